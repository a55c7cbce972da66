"""Answers that are not what was asked for: the client's own requests to a small local server that spoils them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="TRL's client asks for vLLM; `make setup-vllm` installs the CPU build")

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from grpo_lab.trainer.settings.parse import ServerSettings

PROMPTS = [[5, 6, 7], [9, 10]]
Answer = dict[str, Any]


def right(body: Answer) -> Answer:
    """What vLLM answers, three tokens each."""
    choices = []
    for row in range(len(body["prompt"]) * body["n"]):
        ids = [20 + row, 3, 4]
        tokens, scored = [f"token_id:{token}" for token in ids], body["logprobs"] is not None
        top = [{token: -0.5} for token in tokens]
        logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * 3, "top_logprobs": top} if scored else None
        prompt = body["prompt"][row // body["n"]]
        choices.append({
            "index": row, "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": "length", "logprobs": logprobs,
        })  # fmt: skip
    return {"choices": choices}


class Spoiling(http.server.BaseHTTPRequestHandler):
    """A vLLM server as far as the client asks; `page` makes the body of every POST from the right answer."""

    page: Callable[[Answer], bytes]

    def do_GET(self) -> None:
        facts = {"data": [{"id": "m"}], "vllm_config": {"model_config": {"dtype": "float32", "max_model_len": 64}}}
        self._send(json.dumps(facts).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        self._send(type(self).page(right(body) if "prompt" in body else {"success": True}))

    def _send(self, page: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def spoiling() -> Iterator[tuple[type[Spoiling], LabVLLMClient]]:
    handler = type("Handler", (Spoiling,), {"page": staticmethod(lambda answer: json.dumps(answer).encode())})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield handler, LabVLLMClient(ServerSettings(retries=0), base_url=url, connection_timeout=5)
    server.shutdown()
    server.server_close()


def of_row(row: int, **fields: Any) -> Callable[[Answer], Any]:
    return lambda answer: answer["choices"][row].update(fields)


def nothing_scored(answer: Answer) -> None:
    for choice in answer["choices"]:
        choice["logprobs"] = None


def log_prob(value: Any) -> Callable[[Answer], Any]:
    return lambda answer: answer["choices"][1]["logprobs"]["top_logprobs"][0].update({"token_id:21": value})


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda answer: answer["choices"].pop(), "3 completions for 4"),
        (lambda answer: answer["choices"].append(answer["choices"][0]), "5 completions for 4"),
        (lambda answer: answer["choices"].clear(), "0 completions for 4"),
        (lambda answer: answer["choices"].reverse(), "completion 0 is of another prompt"),
        (of_row(3, prompt_token_ids=[9]), "completion 3 is of another prompt"),
        (of_row(2, finish_reason="abort"), "completion 2 was broken off after 3 tokens"),
        (of_row(1, token_ids=[]), "completion 1 has 0 tokens, and 1 to 8 were asked for"),
        (of_row(1, token_ids=[1] * 9), "completion 1 has 9 tokens"),
        (of_row(1, token_ids=None), "no vLLM server, or one of another release"),
        (of_row(1, token_ids=[21, 3]), "completion 1 has log-probs that are not those of its tokens"),
        (of_row(1, token_ids=[21, 3, 10**6]), "completion 1 has log-probs that are not those of its tokens"),
        (nothing_scored, "completion 0 has log-probs that are not those of its tokens"),
        (of_row(2, logprobs=None), "completion 2 has log-probs that are not those of its tokens"),
        (log_prob("-0.5"), "no vLLM server, or one of another release"),
        (lambda answer: answer.clear(), "no vLLM server, or one of another release"),
    ],
)
def test_completions_that_were_not_asked_for_are_refused(
    spoiling: tuple[type[Spoiling], LabVLLMClient], spoil: Callable[[Answer], Any], told: str
) -> None:
    """Before, a batch too long, in another order, broken off or without some log-probs was trained on; the rest ended
    in a traceback without a checkpoint."""
    handler, client = spoiling
    assert client.generate(PROMPTS, n=2, max_tokens=8)["completion_ids"] == [[20 + row, 3, 4] for row in range(4)]

    def page(answer: Answer) -> bytes:
        spoil(answer)
        return json.dumps(answer).encode()

    handler.page = staticmethod(page)
    with pytest.raises(ServerGone, match=told):
        client.generate(PROMPTS, n=2, max_tokens=8)


@pytest.mark.not_fast
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -9999.0])
def test_a_log_prob_that_is_no_number_is_the_engines_fault(
    spoiling: tuple[type[Spoiling], LabVLLMClient], value: float
) -> None:
    handler, client = spoiling
    handler.page = staticmethod(lambda answer: (log_prob(value)(answer), json.dumps(answer).encode())[1])
    with pytest.raises(EngineFault, match="position 0 of completion 1"):
        client.generate(PROMPTS, n=2, max_tokens=8)


@pytest.mark.not_fast
@pytest.mark.parametrize("page", [b"<html>Sign in</html>", b"", b"[1]", b'{"choices": ['])
@pytest.mark.parametrize("call", ["generate", "generate_unscored", "reset_prefix_cache"])
def test_an_answer_that_is_no_json_is_a_lost_server(
    spoiling: tuple[type[Spoiling], LabVLLMClient], call: str, page: bytes
) -> None:
    handler, client = spoiling
    handler.page = staticmethod(lambda answer: page)
    with pytest.raises(ServerGone, match="is no vLLM server, or one of another release"):
        getattr(client, call)(*([] if call == "reset_prefix_cache" else [PROMPTS]))
