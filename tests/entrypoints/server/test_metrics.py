import re

from prometheus_client.parser import text_string_to_metric_families

from outrider.entrypoints.server.metrics import FINISH_REASONS
from tests.entrypoints.server.app_client import AppClient
from tests.entrypoints.server.metric_figures import figures
from tests.entrypoints.server.scripted_llm import HELLO, Part, ScriptedLLM

# vLLM's names, as its dashboards use them, and their types.
TYPES = {
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:kv_cache_usage_perc": "gauge",
}


def test_names_and_types() -> None:
    response = AppClient.over(ScriptedLLM(HELLO)).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {f.name: f.type for f in text_string_to_metric_families(response.text)}
    found = {name: kind for name, kind in found.items() if not name.endswith("_created")}
    assert found == TYPES
    for name, kind in TYPES.items():
        assert bool(re.search(rf"^{name}_total[{{ ]", response.text, re.M)) == (kind == "counter")


def test_what_is_counted() -> None:
    llm = ScriptedLLM([*HELLO[:2], Part("", [], "stop", index=1), HELLO[2]])
    client = AppClient.over(llm)
    assert client.complete(prompt=[[1, 2, 3], [4]], n=2).status_code == 200
    found = figures(client.get("/metrics").text)
    assert found["vllm:prompt_tokens_total"] == 4
    assert found["vllm:generation_tokens_total"] == 8
    assert found["vllm:request_success_total:stop"] == 4
    assert found["vllm:request_success_total:abort"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == 4
    # The second choice of each prompt emits no token.
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 2 * 2
    assert found["vllm:spec_decode_num_drafts_total"] == llm.totals.num_drafts == 4
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 10
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 4
    per_position = [
        found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total:{i}"] for i in range(3)
    ]
    assert per_position == [4, 0, 0]
    assert found["vllm:num_requests_running"] == 1
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:num_preemptions_total"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:prefix_cache_queries_total"] == 90
    assert found["vllm:prefix_cache_hits_total"] == 64


def test_tokens_of_one_step_share_its_time() -> None:
    script: list[Part | None] = [Part("a", [1]), Part("bcd", [2, 3, 4]), Part("", [], "length")]
    client = AppClient.over(ScriptedLLM(script))
    client.complete()
    found = figures(client.get("/metrics").text)
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    spent = (
        found["vllm:time_to_first_token_seconds_sum"]
        + found["vllm:inter_token_latency_seconds_sum"]
    )
    assert 0 < spent <= found["vllm:e2e_request_latency_seconds_sum"]


def test_each_application_counts_for_itself() -> None:
    first, second = (AppClient.over(ScriptedLLM(HELLO)) for _ in range(2))
    first.complete()
    assert figures(first.get("/metrics").text)["vllm:generation_tokens_total"] == 4
    assert figures(second.get("/metrics").text)["vllm:generation_tokens_total"] == 0


def test_a_request_that_was_refused_is_no_completion() -> None:
    """As a grammar is that does not compile, which shows when the request has been admitted."""
    client = AppClient.over(ScriptedLLM(HELLO, late_refusal="the prompt is wrong"))
    assert client.complete(prompt=["a", "b"], n=2).status_code == 400
    found = figures(client.get("/metrics").text)
    ends = {found[f"vllm:request_success_total:{reason}"] for reason in FINISH_REASONS}
    assert ends == {0}


def test_the_death_of_the_engine_is_an_error() -> None:
    client = AppClient.over(ScriptedLLM(HELLO, dies_after=1))
    assert client.complete(n=2).status_code == 503
    found = figures(client.get("/metrics").text)
    assert found["vllm:request_success_total:error"] == 2
    assert found["vllm:request_success_total:abort"] == 0


def test_a_token_that_nobody_sees_is_not_counted() -> None:
    script: list[Part | None] = [Part("a", [1], "length")]
    client = AppClient.over(ScriptedLLM(script))
    usage = client.complete(prompt=[5, 6], echo=True, max_tokens=0).json()["usage"]
    found = figures(client.get("/metrics").text)
    assert usage["completion_tokens"] == found["vllm:generation_tokens_total"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 0
    assert found["vllm:prompt_tokens_total"] == usage["prompt_tokens"] == 2
    assert found["vllm:request_success_total:length"] == 1
