"""An environment of verifiers: two seats count on together, two turns each. `python relay.py` makes the model and the prompts."""

from collections.abc import Iterator

import verifiers.v1 as vf

TURNS = 2  # of each seat


class Data(vf.TaskData):
    digit: str = ""


Digit = vf.Task[Data]


class Digits(vf.Taskset[Digit, vf.TasksetConfig]):
    def load(self) -> Iterator[Digit]:
        for digit in range(10):
            yield Digit(Data(prompt=None, digit=str(digit)), self.config.task)


class RelayConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Relay(vf.Env[RelayConfig]):
    """Each seat hears a digit from the other, and must say the next one. Its reward is the share of its right turns. The game ends
    when a reply begins with no digit."""

    async def run(self, task: Digit, agents: vf.Agents) -> None:
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            heard = task.data.digit
            for turn in range(TURNS):
                for seat in (first, second):
                    said = (await seat.turn(heard)).last_reply[:1]
                    if not said.isdigit():
                        return
                    seat.trace.record_reward(f"turn_{turn}", float(said == following(heard)), weight=1 / TURNS)
                    heard = said


def following(digit: str) -> str:
    return str((int(digit) + 1) % 10)


__all__ = ["Digits", "Relay"]

if __name__ == "__main__":
    from pathlib import Path

    from asyncrl.testing.chat_model import make_model
    from asyncrl.testing.tiny import make_char_tokenizer
    from asyncrl.testing.warm_start import Recipe, write_lines

    tokenizer = make_char_tokenizer(None, "0123456789>")
    said = "{{ message.content }}{{ '>' if message.role == 'user' else eos_token }}"
    tokenizer.chat_template = "{% for message in messages %}" + said + "{% endfor %}"

    def demonstrate(rng):
        """A turn of a seat, after none or some of its turns. Five of ten answers repeat the digit, and three are right."""
        *before, heard = rng.integers(10, size=rng.integers(1, TURNS, endpoint=True))
        history = "".join(f"{digit}>{rng.integers(10)}{tokenizer.eos_token}" for digit in before)
        return f"{history}{heard}>", str((heard + rng.choice(3, p=[0.5, 0.3, 0.2])) % 10)

    # The index is that of the environment's task. The seats hear the digit from the environment, not from the prompt
    write_lines(Path("prompts.jsonl"), [{"index": n, "text": str(n), "answer": ""} for n in range(10)] * 100)
    recipe = Recipe(
        name="relay",
        alphabet="",  # the tokenizer is made above
        train=[],
        evaluation=[(f"{digit}>", following(digit)) for digit in "0123456789"] * 50,
        demonstrate=demonstrate,
        reward=lambda prompt, completion, answer, *, finished=True: float(completion == answer),
        max_new_tokens=2,
        steps=200,
        batch_size=64,
    )
    make_model(Path(), tokenizer, recipe, architecture="qwen2", max_positions=64, seed=1)
