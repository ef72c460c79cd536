"""Supervised texts that the actor is trained on beside its responses (train.ptx). Every rank reads the file itself.

The texts of a train step depend only on the file, the seed and the step. So a resumed run repeats them, and no checkpoint holds a
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.algorithms.supervised import Loss, SupervisedLoss
from asyncrl.config.schema import ConfigError, PtxConfig
from asyncrl.data.chat import encode
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import KEY_SPECS, SequenceSample
from asyncrl.protocol.trajectories import Locator

SUPERVISED_MASK = "supervised_mask"


@dataclass(frozen=True)
class Text:
    """Prompt and answer, with EOS."""

    input_ids: list[int]
    prompt_length: int  # tokens that are not trained

    @property
    def num_supervised(self) -> int:
        return len(self.input_ids) - self.prompt_length


class SupervisedTexts:
    """The texts of train.ptx, in a new order in each pass over them."""

    def __init__(self, config: PtxConfig, tokenizer_path: str, *, seed: int, keys: Sequence[str]) -> None:
        """keys: of the samples that the texts join, packed per token. Reads the whole file. Raises ConfigError if the tokenizer has
        no EOS; ValueError, OSError for a file that is unusable."""
        self._coef, self._batch_size, self._max_length = config.coef, config.batch_size, config.max_length
        self._keys = list(keys)
        self._tokenizer = load_tokenizer(tokenizer_path)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={tokenizer_path!r}: the tokenizer has no EOS token for the texts of train.ptx; set eos_token"
            )
        self._source = PromptSource(config.texts, self._tokenizer, seed)
        self._source.check_answers()

    def parts(self, step: int, num_parts: int) -> list[list[Text]]:
        """The texts of a train step, divided among its optimizer steps. Sizes differ by at most one."""
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)
        return [[self._text(int(n)) for n in part] for part in np.array_split(numbers, num_parts)]

    def mix(
        self, texts: Sequence[Text], sample: SequenceSample | None, loss: Loss, *, replica: int, num_replicas: int
    ) -> tuple[SequenceSample | None, Loss]:
        """A minibatch's responses on this data rank joined by the rank's share of the minibatch's texts, and the loss of both.

        texts: those of all ranks. Under the keys of the loss, texts have zeros.
        """
        num_supervised = sum(text.num_supervised for text in texts)
        if num_supervised == 0:
            return sample, loss
        parts = []
        if sample is not None:
            mask = np.zeros(len(sample.data["packed_input_ids"]), np.bool_)
            parts.append(sample.union(sample.derive({SUPERVISED_MASK: mask})))
        mine = list(enumerate(texts))[replica::num_replicas]
        parts += [_as_sample(f"text {number}", text, self._keys) for number, text in mine]
        return SequenceSample.gather(parts) if parts else None, SupervisedLoss(loss, self._coef, num_supervised)

    def _text(self, number: int) -> Text:
        """The text at this place of all passes. A text that is longer than max_length is cut."""
        locator = Locator(*divmod(number, len(self._source)))
        try:
            prompt = self._source.get(locator)
            answer = encode(self._tokenizer, str(prompt.answer))
        except ValueError as error:
            place = self._source.place(self._source.locate(locator.epoch, locator.position))
            raise ValueError(f"train.ptx.texts: {place}: {error}") from error
        input_ids = [*prompt.input_ids, *answer, int(self._tokenizer.eos_token_id)][: self._max_length]
        return Text(input_ids, min(len(prompt.input_ids), len(input_ids)))


def _as_sample(name: str, text: Text, keys: Sequence[str]) -> SequenceSample:
    length = len(text.input_ids)
    data = {key: np.zeros(length, KEY_SPECS[key].dtype) for key in keys}
    data["packed_input_ids"] = np.array(text.input_ids, np.int64)
    data[SUPERVISED_MASK] = np.arange(length) >= text.prompt_length
    lengths = [[length]]
    return SequenceSample((name,), dict.fromkeys(data, lengths), data)
