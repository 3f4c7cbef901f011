"""Qwen4-Exp: configuration, text trunk, MTP head and their checkpoint format."""
