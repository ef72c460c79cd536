def reward(prompt: str, completion: str, answer: str) -> float:
    return sum(map(ord, completion)) / 1000
