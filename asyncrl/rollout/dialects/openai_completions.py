"""OpenAI's completions: a prompt of text, without a chat template.

A prompt that begins with the whole text of an earlier answer's sequence continues it with its exact tokens. An answer that ended
with EOS is not continued: its text does not show the token, so the longer text is a new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from asyncrl.data.chat import shortened
from asyncrl.rollout.dialects.dialect import Conversation, Dialect, Events, Piece, Reply, event
from asyncrl.rollout.dialects.openai_chat import head_of, usage_of
from asyncrl.rollout.openai_request import RequestError
from asyncrl.rollout.openai_session import Answer

_KIND = "text_completion"
_OF_CHATS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
    "max_completion_tokens",
    "top_logprobs",
)


class CompletionEvents(Events):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._lengths: dict[int, int] = {}  # characters of each answer's tokens so far

    def piece(self, index: int, piece: Piece) -> bytes:
        logprobs = None
        if piece.token_ids:
            logprobs = _logprobs(self.reply, piece.token_ids, piece.logprobs, start=self._lengths.get(index, 0))
            self._lengths[index] = self._lengths.get(index, 0) + sum(map(len, logprobs["tokens"]))
        return self._choice(index, piece.text, logprobs=logprobs)

    def answered(self, index: int, answer: Answer) -> bytes:
        return self._choice(index, "", finish_reason=answer.finish_reason)

    def end(self, answers: Sequence[Answer]) -> bytes:
        usage = b""
        if self.reply.request.include_usage:
            usage = event({**head_of(self.reply, _KIND), "choices": [], "usage": usage_of(answers)})
        return usage + b"data: [DONE]\n\n"

    def _choice(
        self, index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**head_of(self.reply, _KIND), "choices": [choice]})


class OpenAICompletions(Dialect):
    path = "/v1/completions"
    id_prefix = "cmpl-"
    events = CompletionEvents
    gives_several = True
    is_text = True
    ignorable = frozenset({"suffix", "echo", "best_of"})

    def chat_fields(self, fields: dict[str, Any], conversation: Conversation) -> dict[str, Any]:
        for name in _OF_CHATS:
            if name in fields:
                raise RequestError(f"{name}: {self.path} has no such field; use /v1/chat/completions", param=name)
        asked = dict(fields)
        prompt = asked.pop("prompt", None)
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(
                f"prompt={shortened(prompt)}: must be one text that is not empty; send several prompts, or tokens as their text, "
                "in a request each",
                param="prompt",
            )
        if asked.get("echo") is False:
            del asked["echo"]
        if asked.get("best_of") == asked.get("n", 1):
            asked.pop("best_of", None)
        if (logprobs := asked.pop("logprobs", None)) is not None:
            if logprobs != 0 or isinstance(logprobs, bool):
                raise RequestError(
                    f"logprobs={logprobs!r}: only the logprobs of sampled tokens are known; use 0", param="logprobs"
                )
            asked["logprobs"] = True
        return {**asked, "messages": [{"role": "user", "content": prompt}]}

    def body(self, reply: Reply, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            **head_of(reply, _KIND),
            "choices": [
                {
                    "index": index,
                    "text": answer.said.content,
                    "logprobs": _logprobs(reply, answer.response.output_ids, answer.response.logprobs)
                    if reply.request.logprobs
                    else None,
                    "finish_reason": answer.finish_reason,
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage_of(answers),
        }


def _logprobs(reply: Reply, token_ids: Sequence[int], logprobs: Sequence[float], *, start: int = 0) -> dict[str, Any]:
    """Logprobs of every sampled token, as in openai_chat.py. start: characters of the answer's tokens before them."""
    tokens = [reply.decode_token(token) for token in token_ids]
    begin = len(reply.request.messages[0]["content"]) + start
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=begin)),
    }
