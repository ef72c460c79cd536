"""A judge that learns beside the actor: its scores are the actor's rewards. The true outcome is known for a quarter of the
prompts, and trains the judge. A right answer is at most one away from the digit of the prompt."""

import asyncio
from pathlib import Path

import numpy as np
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.dataflow.mfc import mfc
from asyncrl.model.interfaces import Interface, train_minibatches


async def step(models, batch):
    batch = batch.union(models.actor.inf(batch), models.judge.score(batch))
    batch = batch.union(models.actor.advantages(batch))
    known = batch.chunk(4)[0]
    await asyncio.gather(models.actor.train(batch), models.judge.train(known))


@mfc(role="judge", input_keys=["packed_input_ids", "rewards"], output_keys=["dense_rewards"])
def score(engine, sample, train):
    """The judge's probability that a response is right, as a reward at its last token."""
    values, last = engine.values(sample), sample.cu_seqlens()[1:] - 1
    logits = np.zeros(len(last)) if values is None else values[last]  # None: no groups on this rank
    rewards = np.zeros(sample.total_tokens(), np.float32)
    rewards[last] = 1 / (1 + np.exp(-logits))
    agrees = (logits > 0) == (sample.data["rewards"] > 0)
    num_agreed, num = engine.all_reduce_sum([agrees.sum(), len(agrees)])
    return sample.derive({"dense_rewards": rewards}), {"judge/accuracy": num_agreed / num}


@mfc(role="judge", name="judge_train", kind="train_step", input_keys=["packed_input_ids", "loss_mask", "rewards"])
class Train(Interface):
    """Cross-entropy of the judge's probabilities with the true outcomes."""

    def run(self, engine, sample, *, batch_ids, step):
        def loss_of(_, num_responses):
            def loss(outputs, data, cu_seqlens):
                logits = outputs["values"][cu_seqlens[1:] - 1]
                return binary_cross_entropy_with_logits(logits, data["rewards"], reduction="sum") / num_responses, {}

            return loss

        steps = train_minibatches(engine, sample, [batch_ids], loss_of, temperature=1.0, lr_step=step.version)
        return None, steps.result("judge")


def reward(prompt, completion, answer):
    """The true outcome: the judge learns from it. The actor does not, because of reward_scaling=0."""
    return float(completion.isdigit() and abs(int(prompt) - int(completion)) <= 1)


if __name__ == "__main__":
    from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
    from asyncrl.testing.warm_start import write_lines

    write_lines(Path("prompts.jsonl"), [{"prompt": digit, "answer": ""} for digit in "12345678"] * 1000)
    make_tiny_model("model", tokenizer=make_char_tokenizer(None, "12345678"))
