"""Training of trunk and MTP head: tokenizer, corpus, loss, optimiser loop."""
