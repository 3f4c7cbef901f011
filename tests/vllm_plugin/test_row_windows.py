"""The rows of a pass are put together by request, each exactly once."""

import torch

from outrider.vllm_plugin.row_windows import row_windows


def test_requests_with_as_many_rows_are_one_window() -> None:
    decode, prompt = row_windows([0, 4, 8, 15])
    assert decode.requests.tolist() == [0, 1]
    assert decode.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert prompt.requests.tolist() == [2]
    assert prompt.rows.tolist() == [list(range(8, 15))]


def test_requests_of_different_kinds_are_apart() -> None:
    windows = row_windows([0, 2, 4, 6], [True, False, True])
    assert [window.requests.tolist() for window in windows] == [[0, 2], [1]]


def test_a_request_without_rows_is_in_no_window() -> None:
    windows = row_windows([0, 3, 3, 4, 4])
    assert [window.requests.tolist() for window in windows] == [[0], [2]]
    assert torch.cat([window.rows.flatten() for window in windows]).tolist() == [0, 1, 2, 3]
    assert row_windows([0, 0]) == []
