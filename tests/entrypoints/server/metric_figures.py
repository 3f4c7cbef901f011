"""Reads the text that Prometheus scrapes."""

from prometheus_client.parser import text_string_to_metric_families


def figures(text: str) -> dict[str, float]:
    """Samples by name, those of a label that tells them apart with its value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            name = sample.name + "".join(f":{value}" for value in labels.values())
            found[name] = sample.value
    return found
