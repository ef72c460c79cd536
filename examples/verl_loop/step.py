"""The training loop of verl's RayPPOTrainer as a function: a model counts down from a digit, by PPO with a critic."""

import asyncio


async def step(models, prompts):
    batch = await models.actor.generate(prompts.next(64), n=4)  # generate_sequences; each response has its reward
    old = models.actor.inf(batch)  # compute_log_prob
    ref = models.ref.inf(batch)  # compute_ref_log_prob
    values = models.critic.inf(batch)  # compute_values
    batch = batch.union(old, ref, values)
    batch = batch.union(models.actor.advantages(batch))  # apply_kl_penalty, compute_advantage
    critic, actor = models.critic.train(batch), models.actor.train(batch)  # update_critic, update_actor
    await asyncio.gather(critic, actor)


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
