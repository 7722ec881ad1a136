"""Processes that receive weights, and versions to send them."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

from contextlib import AbstractAsyncContextManager

import msgspec
import torch

from rolloutbus.bus.weights.manifest import digest_of, lay_out, total_bytes
from rolloutbus.bus.wire.messages.weights import Manifest, Offer
from tests.line_process import LineProcess, line_processes

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


class Version:
    """Random weights of several dtypes on one GPU, about 18 MiB."""

    def __init__(self, number: int, seed: int, device: str = "cuda:0") -> None:
        generator = torch.Generator(device).manual_seed(seed + number)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.number = number
        self.tensors = [
            randn(1031, 1027),
            randn(7, 33).bfloat16(),
            randn(1024, 2048).t(),
            torch.tensor(0.5, dtype=torch.float64, device=device),
            randn(0, 4),
            randn(2579, 1031).bfloat16(),
        ]
        self.layout = lay_out(
            (f"t{i}", DTYPES[each.dtype], tuple(each.shape)) for i, each in enumerate(self.tensors)
        )
        raws = [each.contiguous().view(-1).view(torch.uint8) for each in self.tensors]
        self.digests = {
            tensor.name: digest_of(raw.cpu().numpy())
            for tensor, raw in zip(self.layout, raws, strict=True)
        }

    def manifest(self, offers: list[Offer]) -> str:
        """As JSON."""
        tensors = [
            msgspec.structs.replace(each, digest=self.digests[each.name]) for each in self.layout
        ]
        size = total_bytes(self.layout)
        manifest = Manifest("default", self.number, "", "", size, tensors, offers)
        return msgspec.json.encode(manifest).decode()


def weight_receivers(
    transport: str, gpus: list[str]
) -> AbstractAsyncContextManager[list[LineProcess]]:
    """One per GPU named, ready; killed at the end."""
    return line_processes([("tests.gpu.weight_receiver", transport, gpu) for gpu in gpus])
