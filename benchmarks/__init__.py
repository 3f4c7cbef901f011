"""What is measured, and how: one program for each question, each ending in one line of JSON.

- `decode` (`make bench`): tokens per second with K drafts a step against K = 0, in one process.
"""
