"""An agent that asks a tool, turn by turn, and is trained on the tokens that it chose itself.

`python -m rolloutbus.examples.agent`: it guesses a letter, and a tool says whether to look later or
earlier. A session keeps the trajectory on one worker; its transcript says of every token
whether it was sampled, how likely, and by which weights. It takes about a minute on two cores.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.examples.grpo import clipped_loss
from rolloutbus.examples.task import ALPHABET, VOCABULARY
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.types import Transcript

BEGIN, LATER, EARLIER = (VOCABULARY.index(text) for text in ("<s>", "=", "<pad>"))
LETTERS = [VOCABULARY.index(letter) for letter in ALPHABET[:8]]
GUESS = SamplingParams(max_new_tokens=1, ignore_eos=True)
MAX_TURNS, N_GROUPS, GROUP_SIZE = 5, 8, 8

Trajectory = tuple[Transcript, float]
"""What was said, and the reward."""


async def play(client: RolloutClient, name: str, secret: int) -> Trajectory:
    """One trajectory; the sooner the secret is guessed, the higher its reward."""
    async with client.session(name, wait_s=60.0) as session:
        session.append([BEGIN])
        for n_wrong in range(MAX_TURNS):
            rollout = await session.sample(GUESS, action_mask=LETTERS, versions="latest")
            if rollout.tokens[0] == secret:
                return session.transcript, 1.0 - n_wrong / MAX_TURNS
            session.append([LATER if rollout.tokens[0] < secret else EARLIER])  # the tool
        return session.transcript, 0.0


def loss_of(model: LlamaForCausalLM, rows: Sequence[Trajectory]) -> torch.Tensor:
    """GRPO's loss of groups one after another, over sampled tokens only; float32 scalar."""
    rewards = torch.tensor([reward for _, reward in rows]).view(-1, GROUP_SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    columns = zip(*((row.tokens, row.loss_mask, row.logprobs) for row, _ in rows), strict=True)
    tokens, mask, behaviour = (
        pad_sequence([torch.from_numpy(each) for each in column], batch_first=True)
        for column in columns
    )
    mine = mask[:, 1:].bool()
    logits = model(input_ids=tokens[:, :-1]).logits
    allowed = torch.full((logits.shape[-1],), -torch.inf)
    allowed[LETTERS] = 0.0  # as it was sampled: the action mask changes what is likely
    logprobs = (logits + allowed).log_softmax(-1).gather(-1, tokens[:, 1:, None].long())[..., 0]
    spread = advantages[:, None].expand_as(logprobs)
    return clipped_loss(logprobs[mine], behaviour[:, 1:][mine], spread[mine])


async def train(client: RolloutClient, model: LlamaForCausalLM, n_steps: int) -> float:
    """Train in place; returns the mean reward of the last step."""
    rng, publisher = Random(0), rolloutbus.WeightPublisher(client)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reward = 0.0
    for step in range(n_steps):
        secrets = rng.sample(LETTERS, k=N_GROUPS)
        games = [(secret, number) for secret in secrets for number in range(GROUP_SIZE)]
        plays = [play(client, f"{step}-{secret}-{number}", secret) for secret, number in games]
        rows = await asyncio.gather(*plays)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
        await publisher.publish(model, require="all")
        reward = sum(reward for _, reward in rows) / len(rows)
        print(f"step {step + 1:3d}  reward {reward:.3f}")
    return reward


async def main(n_steps: int = 100) -> None:
    """Bring a fleet up and train with it."""
    torch.set_num_threads(1)  # the engines want the other cores
    with tempfile.TemporaryDirectory() as directory:
        build_tiny_model(Path(directory), seed=0)
        async with (
            rolloutbus.up(model=directory, workers=2, engine_options={"threads": 1}) as fleet,
            rolloutbus.connect(fleet.address, name="trainer") as client,
        ):
            await train(client, load_tiny_model(Path(directory)), n_steps)


if __name__ == "__main__":
    asyncio.run(main())
