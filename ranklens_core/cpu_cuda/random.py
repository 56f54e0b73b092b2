"""The stand-in's random generator: a stream of its own, beside the CPU's default one.

CUDA has a default generator for each device. Megatron relies on it: it forks that generator's state to give
tensor-parallel ranks different dropout and equal data order. The stand-in keeps one CPU generator for the
device; an operator that draws on the device runs with that generator's state in the CPU's default generator,
which is given back its own state afterwards. So every random operator draws from the right stream, also those
that take no ``generator``, and the CPU's stream is what it would be beside a GPU.

States are those of a CPU generator (5056 bytes, Mersenne Twister), not CUDA's 16 bytes (Philox): the numbers
are not those a GPU draws. All device indices share the one generator, as one process drives one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .naming import names_cuda

# Every public torch function that draws random numbers and reaches a function mode under its own name.
_DRAWING = {
    torch: """
        rand randn randint randperm normal rand_like randn_like randint_like bernoulli multinomial poisson
        binomial dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
        feature_alpha_dropout feature_alpha_dropout_ native_dropout rrelu rrelu_ lstm gru rnn_tanh rnn_relu
    """,
    torch.Tensor: """
        normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ bernoulli multinomial
    """,
    torch.nn.functional: """
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax
        scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d
    """,
    torch.nn.init: """
        uniform_ normal_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
        orthogonal_ sparse_
    """,
}


def drawing_functions() -> frozenset[Callable[..., Any]]:
    """The torch functions that draw random numbers, as this version of torch has them."""
    return frozenset(
        getattr(owner, name)
        for owner, names in _DRAWING.items()
        for name in names.split()
        if hasattr(owner, name)
    )


class _EveryIndex:
    """``torch.cuda.default_generators``: any index, also a `torch.device`, finds the one generator."""

    def __init__(self, generator: torch.Generator, device_count: Callable[[], int]) -> None:
        self._generator = generator
        self._device_count = device_count

    def __getitem__(self, _: object) -> torch.Generator:
        return self._generator

    def __len__(self) -> int:
        return self._device_count()

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter([self._generator] * len(self))


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    """Makes ``torch.Generator(device="cuda")`` a CPU generator, and ``isinstance`` see both types as one."""

    def __call__(cls, device: str | torch.device | int | None = "cpu") -> torch.Generator:
        return torch._C.Generator(device="cpu" if names_cuda(device) else device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_GeneratorType):
    """The type ``torch.Generator`` while the stand-in is installed."""


class DeviceRandom:
    """The device's generator and the ``torch.cuda`` functions about it.

    It starts from the CPU's initial seed: a program that called ``torch.manual_seed`` before has then seeded
    the device too, as it would have with CUDA.
    """

    def __init__(self, device_count: Callable[[], int]) -> None:
        self.generator = torch._C.Generator(device="cpu")
        self.generator.manual_seed(torch.initial_seed())
        self._device_count = device_count

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """In this block, the CPU's default generator continues the device's stream.

        Not for two threads at once: like any draw, it uses the process's one default generator.
        """
        cpu = torch.default_generator
        cpu_state = cpu.get_state()
        cpu.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(cpu.get_state())
            cpu.set_state(cpu_state)

    def get_rng_state(self, device: object = "cuda") -> torch.Tensor:
        """State of the device's generator: uint8, on the CPU, as with CUDA."""
        return self.generator.get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.generator.get_state() for _ in range(self._device_count())]

    def set_rng_state(self, new_state: torch.Tensor, device: object = "cuda") -> None:
        self.generator.set_state(new_state)

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        for new_state in new_states:
            self.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(int(seed))

    def seed(self) -> None:
        self.generator.seed()

    def initial_seed(self) -> int:
        return self.generator.initial_seed()

    def replacements(self) -> dict[str, object]:
        """Stand-ins by their name in ``torch.cuda``."""
        return {
            "default_generators": _EveryIndex(self.generator, self._device_count),
            "get_rng_state": self.get_rng_state,
            "get_rng_state_all": self.get_rng_state_all,
            "set_rng_state": self.set_rng_state,
            "set_rng_state_all": self.set_rng_state_all,
            "manual_seed": self.manual_seed,
            "manual_seed_all": self.manual_seed,
            "seed": self.seed,
            "seed_all": self.seed,
            "initial_seed": self.initial_seed,
        }

    def checkpoint_replacements(self) -> dict[str, object]:
        """Stand-ins by their name in ``torch.utils.checkpoint``.

        Recomputing must repeat the device's draws. torch saves the generators of the devices it finds among
        the arguments, and would find none.
        """

        def get_device_states(*args: object) -> tuple[list[int], list[torch.Tensor]]:
            return [0], [self.get_rng_state()]

        def set_device_states(
            devices: list[int], states: list[torch.Tensor], *, device_type: str | None = None
        ) -> None:
            self.set_rng_state_all(states)

        return {"get_device_states": get_device_states, "set_device_states": set_device_states}
