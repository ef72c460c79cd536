"""GRPO as a function, on the groups that have something to teach: a model learns to count on from a digit."""


async def step(models, batch):
    batch = batch.union(models.actor.inf(batch), models.ref.inf(batch))  # both run now
    batch = batch.union(models.actor.advantages(batch))
    mixed = [id for id, rewards in zip(batch.ids, batch.rewards, strict=True) if max(rewards) > min(rewards)]
    await models.actor.train(batch.select(mixed) if mixed else batch)


def reward(prompt, completion, answer):
    """The share of the answer's digits before the first wrong one."""
    places = range(len(answer))
    return next((place for place in places if completion[place : place + 1] != answer[place]), len(answer)) / len(
        answer
    )


if __name__ == "__main__":
    from pathlib import Path

    from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
    from asyncrl.testing.warm_start import write_lines

    digits = "0123456789"
    rows = [{"prompt": digit, "answer": (digits * 2)[number + 1 : number + 4]} for number, digit in enumerate(digits)]
    write_lines(Path("prompts.jsonl"), rows * 100)
    make_tiny_model("model", tokenizer=make_char_tokenizer(None, digits), hidden_size=32, num_layers=1)
