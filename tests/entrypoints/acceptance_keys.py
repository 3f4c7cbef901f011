"""The keys of a row of acceptance, in their order: a promise to those who read the JSON."""

ROW_KEYS = [
    "suite",
    "k",
    "temperature",
    "rule",
    "draft_sample_method",
    "prompts",
    "mean_acceptance_length",
    "ci95",
    "mean_acceptance_length_fresh",
    "acceptance_rate",
    "acceptance_rate_per_pos",
    "repeated_share",
]
