"""Keyed noise: the hash against its published outputs and a naive integer version, then its quality as random numbers.

Statistical tests run on fixed seeds, so they do not flicker; each states the chance that a perfect generator would have failed it.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.inference import noise

MASK = (1 << 64) - 1
STREAMS = (noise.TOKENS, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)


def naive_bits(seed: int, position: int, token: int, stream: int) -> int:
    """The 31 bits by Python integers, written from the publications and the module's docstring."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden * (stream + 1)) & MASK) + position * golden) & MASK)
    low, high = key & 0xFFFFFFFF, key >> 32
    x = (mix((token * golden) & MASK) & 0xFFFFFFFF) ^ low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = (((x ^ (x >> 15)) + high) * 0x846CA68B) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def draw(
    num_seeds: int = 1, num_positions: int = 1, num_tokens: int = 1, stream: int = 0, first_seed: int = 0
) -> Tensor:
    """Uniform numbers of consecutive seeds, positions and tokens, fp64."""
    seeds = torch.arange(first_seed, first_seed + num_seeds)
    positions = torch.arange(num_positions).expand(num_seeds, -1)
    return noise.uniform(seeds, positions, torch.arange(num_tokens), stream).double()


def test_the_mixer_gives_splitmix64_s_published_outputs() -> None:
    """The first three outputs of SplitMix64 from seed 0, as in its reference implementation's test vectors."""
    counters = torch.tensor([1, 2, 3]) * noise._GOLDEN
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % (1 << 64) for value in noise._mix64(counters).tolist()] == expected


def test_uniform_equals_a_naive_version_in_python_integers() -> None:
    seeds, positions, tokens = [0, 1, 12345, -7, 2**62], [0, 1, 31, 100_000], [0, 1, 49_151, 2**31]
    for stream in STREAMS:
        got = noise.uniform(
            torch.tensor(seeds), torch.tensor(positions).expand(len(seeds), -1), torch.tensor(tokens), stream
        )
        for i, seed in enumerate(seeds):
            for j, position in enumerate(positions):
                for k, token in enumerate(tokens):
                    expected = (naive_bits(seed, position, token, stream) + 0.5) / 2**31
                    assert float(got[i, j, k]) == pytest.approx(min(expected, 1 - 2**-24), rel=1e-6)


def test_the_noise_of_a_seed_is_pinned_for_ever() -> None:
    """A change of these numbers changes the tokens that a seed stands for. (From the naive version.)"""
    got = noise.gumbel(torch.tensor([0, 42]), torch.tensor([[1], [7]]), torch.tensor([0, 5, 49_151]))
    expected = torch.tensor([[0.922079, 0.052477, 0.715431], [-0.264797, 1.959352, -0.41739]])
    torch.testing.assert_close(got[:, 0], expected, atol=1e-5, rtol=1e-5)
    coins = noise.coins(torch.tensor([0, 42]), torch.tensor([[1, 2], [7, 8]]), noise.ACCEPT)
    torch.testing.assert_close(coins, torch.tensor([[0.4966937, 0.3537224], [0.5391144, 0.9508656]]), atol=1e-6, rtol=0)


def test_noise_does_not_depend_on_what_else_is_in_the_call() -> None:
    seeds, positions = torch.tensor([3, 4, 5]), torch.tensor([[7, 8], [20, 21], [0, 1]])
    tokens = torch.arange(50)
    together = noise.gumbel(seeds, positions, tokens)
    for row in range(3):
        for column in range(2):
            alone = noise.gumbel(seeds[row : row + 1], positions[row : row + 1, column : column + 1], tokens[30:31])
            assert torch.equal(alone[0, 0, 0], together[row, column, 30])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(noise.gumbel(seeds[order], positions[order], tokens), together[order])


@pytest.mark.parametrize("shape", [(1, 1, 1_000_000), (1, 1_000_000, 1), (1_000_000, 1, 1), (100, 100, 100)], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_is_uniform_along_tokens_positions_and_seeds(
    tools: SimpleNamespace, shape: tuple[int, int, int], stream: int
) -> None:
    """A million draws in 1,000 cells (chi-square), and the largest gap to the uniform distribution function
    (Kolmogorov-Smirnov). False alarm of each: below 1e-8."""
    values = draw(*shape, stream).flatten()
    counts = torch.histc(values, bins=1000, min=0, max=1)
    assert tools.chi_square_p_value(counts, torch.full((1000,), 1e-3)) > 1e-8
    steps = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    gap = float((values.sort().values - steps).abs().max()) * math.sqrt(len(values))
    assert gap < math.sqrt(-math.log(0.5e-8) / 2)  # Kolmogorov's tail: 2 exp(-2 gap²)


@pytest.mark.parametrize("what", ["position", "token", "seed", "far seed", "stream", "diagonal"])
def test_neighbouring_draws_are_independent(tools: SimpleNamespace, what: str) -> None:
    """Pairs of a million draws in 32 x 32 cells (chi-square) and their correlation. False alarm of each: below 1e-8."""
    first, second = {
        "position": lambda: (draw(10, 1001, 100)[:, :-1], draw(10, 1001, 100)[:, 1:]),
        "token": lambda: (draw(10, 100, 1001)[..., :-1], draw(10, 100, 1001)[..., 1:]),
        "seed": lambda: (draw(1000, 10, 100), draw(1000, 10, 100, first_seed=1)),
        "far seed": lambda: (draw(1000, 10, 100), draw(1000, 10, 100, first_seed=1 << 40)),
        "stream": lambda: (draw(100, 100, 100, noise.DRAFT), draw(100, 100, 100, noise.RESIDUAL)),
        "diagonal": lambda: (draw(101, 101, 100)[:-1, 1:], draw(101, 101, 100)[1:, :-1]),
    }[what]()
    first, second = first.flatten(), second.flatten()
    cells = (first * 32).long() * 32 + (second * 32).long()
    counts = torch.bincount(cells, minlength=1024)
    assert tools.chi_square_p_value(counts, torch.full((1024,), 1 / 1024)) > 1e-8
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) * math.sqrt(len(first)) < 5.8  # two-sided normal tail 7e-9


def test_the_coins_of_one_position_tell_nothing_about_its_gumbel_noise() -> None:
    """Accept coins against token 0 of every other stream, 200,000 seeds; false alarm below 3e-8 (three correlations)."""
    seeds, position = torch.arange(200_000), torch.zeros(200_000, 1, dtype=torch.int64)
    coins = noise.coins(seeds, position, noise.ACCEPT)[:, 0].double()
    for stream in (noise.TOKENS, noise.DRAFT, noise.RESIDUAL):
        other = noise.uniform(seeds, position, torch.zeros(1, dtype=torch.int64), stream).flatten().double()
        correlation = float(torch.corrcoef(torch.stack([coins, other]))[0, 1])
        assert abs(correlation) * math.sqrt(len(coins)) < 5.8


def test_gumbel_noise_has_the_gumbel_law() -> None:
    """Mean 0.5772 (Euler's constant) and variance pi²/6 of a million draws within 5.8 standard errors, its distribution function
    exp(-exp(-x)) by Kolmogorov-Smirnov: false alarm below 3e-8 in all."""
    values = noise.gumbel(torch.tensor([9]), torch.tensor([[3]]), torch.arange(1_000_000)).double().flatten()
    variance = math.pi**2 / 6
    assert abs(float(values.mean()) - 0.5772156649) < 5.8 * math.sqrt(variance / 1e6)
    # The fourth central moment of the law is 5.4 variance², so the sample variance has standard error variance sqrt(4.4 / n).
    assert abs(float(values.var()) - variance) < 5.8 * variance * math.sqrt(4.4 / 1e6)
    steps = torch.arange(1, 1_000_001, dtype=torch.float64) / 1e6
    gap = float((torch.exp(-torch.exp(-values.sort().values)) - steps).abs().max()) * 1e3
    assert gap < math.sqrt(-math.log(0.5e-8) / 2)


def test_gumbel_noise_has_both_tails_and_no_infinity() -> None:
    """The largest of a million is log(1e6) plus a Gumbel variable: in 13.8 - 3 to 13.8 + 19 except with chance 1e-8; the
    smallest is near -log(13.8) = -2.6: below -2.4 and above -3.5 except with chance 8e-8."""
    values = noise.gumbel(torch.tensor([123]), torch.tensor([[0]]), torch.arange(1_000_000))
    assert bool(values.isfinite().all())
    assert 10.8 < float(values.max()) < 32.8
    assert -3.5 < float(values.min()) < -2.4
    assert len(values.unique()) > 900_000  # fine-grained, as the upper tail needs


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 129, 2**32 - 1])
def test_the_extreme_hashes_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Rounding to fp32 must not give 0 or 1, where the Gumbel transform is infinite and a coin of 1 or 0 is wrong."""
    signed = bits - (1 << 32) if bits >= 2**31 else bits
    monkeypatch.setattr(noise, "_mix32", lambda x, key: torch.full_like(x, signed))
    one = torch.zeros(1, dtype=torch.int64)
    value = noise.uniform(one, one[None], one, noise.TOKENS)
    assert 0 < float(value) < 1
    assert bool(noise.gumbel(one, one[None], one).isfinite())
