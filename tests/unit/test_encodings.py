"""How states are stored: what comes back is within the bounds that are promised, token by token."""

import pytest
import torch

from draftsmith.train import encodings

TYPES = [torch.bfloat16, torch.float16, torch.float32]


def states(dtype: torch.dtype) -> torch.Tensor:
    """Like a residual stream: most channels near 1, a few in the thousands; tokens of very different size; one token of zeros."""
    generator = torch.Generator().manual_seed(0)
    states_TD = torch.randn(200, 96, generator=generator) * torch.logspace(-3, 1, 200)[:, None]
    states_TD[:, [5, 60]] *= 300
    states_TD[17] = 0
    return states_TD.to(dtype)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_targets_own_type_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    there = encodings.encode(states(dtype), "target")
    assert there.scale_T is None and torch.equal(encodings.decode(there, dtype), states(dtype))


def e4m3_values() -> torch.Tensor:
    """All that the format has, from its definition: exponent bias 7, subnormal numbers below 2**-6, largest 448."""
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    positive = [m / 8 * 2.0**-6 for m in range(1, 8)] + normal
    return torch.tensor([-value for value in reversed(positive)] + [0.0] + positive, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["float8", "int8"])
def test_eight_bits_bring_back_the_nearest_value_that_they_have(name: encodings.Name, dtype: torch.dtype) -> None:
    """Against a search of the whole grid of codes in fp64; ties and the rounding of the scale may go either way."""
    original = states(dtype)
    coded = encodings.encode(original, name)
    assert coded.scale_T is not None and coded.codes_TD.element_size() == 1 and coded.scale_T.dtype == torch.float32
    grid = e4m3_values() if name == "float8" else torch.arange(-127, 128, dtype=torch.float64)
    scale_T1 = original.double().abs().amax(-1, keepdim=True) / grid.max()
    error_TD = (encodings.decode(coded, torch.float64) - original.double()).abs()
    for t in range(len(original)):
        nearest_D = (original[t].double()[:, None] - grid * scale_T1[t]).abs().amin(1)
        assert bool((error_TD[t] <= nearest_D * (1 + 1e-5) + 1e-6 * original[t].double().abs()).all()), t


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["float8", "int8"])
def test_the_errors_are_within_what_the_documentation_says(name: encodings.Name, dtype: torch.dtype) -> None:
    original = states(dtype).double()
    back = encodings.decode(encodings.encode(states(dtype), name), dtype)
    assert back.dtype == dtype and not back[17].any()
    largest_T1 = original.abs().amax(-1, keepdim=True)
    bound_TD = largest_T1 / 127 / 2
    if name == "float8":
        bound_TD = torch.maximum(original.abs() / 16, largest_T1 / 448 / 1024)
    rounding_TD = torch.finfo(dtype).eps * original.abs() + torch.finfo(dtype).smallest_normal
    assert bool(((back.double() - original).abs() <= bound_TD * (1 + 1e-5) + rounding_TD).all())


def test_the_largest_value_of_a_token_does_not_overflow() -> None:
    for name in ("float8", "int8"):
        values = torch.cat([torch.logspace(-34, 37, 1000), torch.linspace(0.1, 3, 1000)])[:, None] * torch.tensor(
            [1, -0.3]
        )
        back = encodings.decode(encodings.encode(values, name), torch.float32)
        torch.testing.assert_close(back[:, 0], values[:, 0], rtol=1e-6, atol=0)
