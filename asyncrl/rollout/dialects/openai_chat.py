"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.rollout.dialects.dialect import Dialect, Events, Piece, Reply, event
from asyncrl.rollout.openai_session import Answer, message_of


class ChatEvents(Events):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._begun: set[int] = set()

    def piece(self, index: int, piece: Piece) -> bytes:
        logprobs = _logprobs(self.reply, piece.token_ids, piece.logprobs) if piece.token_ids else None
        return self._delta(index, {"content": piece.text}, logprobs=logprobs)

    def answered(self, index: int, answer: Answer) -> bytes:
        calls = enumerate(message_of(answer.said).get("tool_calls", ()))
        deltas = [self._delta(index, {"tool_calls": [{"index": number, **call}]}) for number, call in calls]
        return b"".join([*deltas, self._delta(index, {}, finish_reason=answer.finish_reason)])

    def end(self, answers: Sequence[Answer]) -> bytes:
        usage = b""
        if self.reply.request.include_usage:
            usage = event({**head_of(self.reply, "chat.completion.chunk"), "choices": [], "usage": usage_of(answers)})
        return usage + b"data: [DONE]\n\n"

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**head_of(self.reply, "chat.completion.chunk"), "choices": [choice]})


class OpenAIChat(Dialect):
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    events = ChatEvents
    gives_several = True

    def body(self, reply: Reply, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            **head_of(reply, "chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": {**message_of(answer.said), "refusal": None},
                    "logprobs": _logprobs(reply, answer.response.output_ids, answer.response.logprobs)
                    if reply.request.logprobs
                    else None,
                    "finish_reason": answer.finish_reason,
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage_of(answers),
        }


def head_of(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, sampled = answers[0].num_prompt_tokens, sum(len(answer.response.output_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(reply: Reply, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Logprobs of every sampled token, including the token that ended the answer and those of a stop string."""
    tokens = [reply.decode_token(token) for token in token_ids]
    return {
        "content": [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }
