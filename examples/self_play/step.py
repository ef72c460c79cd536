"""Two models play a game, and both are trained. The actor takes 1 to 3 stones from a heap of 1 to 6, then the opponent
does. The side that takes the last stone wins. If stones are left, it is a draw."""

import asyncio
from pathlib import Path

import numpy as np

from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.mfc import mfc
from asyncrl.model.interfaces import Interface, train_minibatches

MOVES = np.array([1, 2, 3])  # also their token ids
GAME = ["game", "game_mask", "game_won"]  # by token of heap, move and reply: id, is a reply, is a reply that won


async def step(models, batch):
    batch = batch.union(models.actor.inf(batch), models.opponent.reply(batch))
    batch = batch.union(models.actor.advantages(batch))
    await asyncio.gather(models.actor.train(batch), models.opponent.train(batch))


@mfc(role="opponent", input_keys=["packed_input_ids"], output_keys=["dense_rewards", *GAME])
def reply(engine, sample, train):
    """Draw the opponent's replies from its probabilities of the legal ones, and reward the actor."""
    heap, move = sample.data["packed_input_ids"].reshape(-1, 2).T
    lengths = sample.seqlens["packed_input_ids"]
    with_reply = [[3] * len(group) for group in lengths]

    def logprobs_of(stones):
        tokens = np.stack([heap, move, np.full_like(heap, stones)], axis=1).ravel()
        games = SequenceSample(sample.ids, {"packed_input_ids": with_reply}, {"packed_input_ids": tokens})
        logprobs = engine.logprobs(games, temperature=1.0)
        return np.zeros(len(heap)) if logprobs is None else logprobs[2::3]  # None: this rank has no games

    left = heap - move
    logprobs = np.stack([logprobs_of(stones) for stones in MOVES], axis=1)
    noise = np.random.default_rng([*"".join(sample.ids).encode()]).gumbel(size=logprobs.shape)
    taken = MOVES[np.where(left[:, None] >= MOVES, logprobs + noise, -np.inf).argmax(axis=1)]
    legal = np.isin(move, MOVES) & (left >= 0)
    won = legal & (left == taken)
    made = {
        "dense_rewards": np.outer(np.where(legal, 1 * (left == 0) - won, -1), [0, 1]).astype(np.float32),
        "game": np.stack([heap, move, taken], axis=1),
        "game_mask": np.outer(legal & (left > 0), [0, 0, 1]).astype(bool),
        "game_won": np.outer(won, [0, 0, 1]).astype(np.float32),
    }
    # A move is best if it takes all or leaves more than 3. With a heap of 4 none is
    best, can_win = legal & ((left == 0) | (left > 3)), legal & (left > 0) & (left <= 3)
    sums = engine.all_reduce_sum([mask.sum() for mask in (best, heap != 4, won, can_win)])
    stats = {"game/best_moves": sums[0] / max(sums[1], 1), "game/best_replies": sums[2] / max(sums[3], 1)}
    seqlens = {"dense_rewards": lengths, **dict.fromkeys(GAME, with_reply)}
    return SequenceSample(sample.ids, seqlens, {key: values.ravel() for key, values in made.items()}), stats


@mfc(role="opponent", name="opponent_train", kind="train_step", input_keys=GAME)
class Train(Interface):
    """REINFORCE: the replies that won become more likely."""

    def run(self, engine, sample, *, batch_ids, step):
        if sample is not None:
            sample = sample.remap_keys({"game": "packed_input_ids", "game_mask": "loss_mask"})

        def loss_of(num, _):
            return lambda outputs, data, _: (-(data["game_won"] * outputs["logprobs"]).sum() / num, {})

        steps = train_minibatches(engine, sample, [batch_ids], loss_of, temperature=1.0, lr_step=step.version)
        return None, steps.result("opponent")


def reward(prompt, completion, answer):
    return 0.0  # the game is played in the step


if __name__ == "__main__":
    from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
    from asyncrl.testing.warm_start import write_lines

    write_lines(Path("prompts.jsonl"), [{"prompt": heap, "answer": ""} for heap in "123456"] * 500)
    make_tiny_model("model", tokenizer=make_char_tokenizer(None, "123456"), hidden_size=32, num_layers=1)
