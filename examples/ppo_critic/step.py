"""PPO with a critic, as a function: the critic learns from all responses, the actor from those that surprised the critic most."""

import asyncio


async def step(models, batch):
    batch = batch.union(models.actor.inf(batch), models.critic.inf(batch))  # both run now
    batch = batch.union(models.actor.advantages(batch))
    groups = zip(batch.ids, await batch.read("advantages"), strict=True)
    surprise = {id: max(abs(a) for response in group for a in response) for id, group in groups}
    half = sorted(batch.ids, key=surprise.__getitem__)[len(batch) // 2 :]
    await asyncio.gather(models.actor.train(batch.select(half)), models.critic.train(batch))


def reward(prompt, completion, answer, *, finished=True):
    """The share of the answer before the first mistake. The end counts like a digit, and a response without end costs 1."""
    said, right = completion + ".", answer + "."
    places = range(len(right))
    share = next((place for place in places if said[place : place + 1] != right[place]), len(right)) / len(right)
    return share if finished else -1.0


if __name__ == "__main__":
    from pathlib import Path

    from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
    from asyncrl.testing.warm_start import write_lines

    rows = [{"prompt": str(digit), "answer": "3210"[4 - digit :]} for digit in range(1, 5)]
    write_lines(Path("prompts.jsonl"), rows * 2000)
    make_tiny_model("model", tokenizer=make_char_tokenizer(None, "01234"), hidden_size=32, num_layers=1)
