"""The most that one request may ask for. Past a limit the answer is a 400 that names the field."""

from __future__ import annotations

# What a choice multiplies is a whole run of the model.
MAX_N = 64
MAX_PROMPTS = 256
MAX_MESSAGES = 1024
MAX_CONTENT_PARTS = 256
MAX_TOOLS = 128
# Characters of a tool as JSON.
MAX_TOOL_LENGTH = 65_536
# Of one message.
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_KWARGS = 16
MAX_STOPS = 32
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 16
MAX_METADATA_LENGTH = 512
# Of a name, an id of a user or a key.
MAX_NAME_LENGTH = 512
# Numbers that go into tensors of 64 bits stay far from their end.
MAX_COUNT = 2**31 - 1
