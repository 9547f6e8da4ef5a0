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


def naive_uniform(seed: int, position: int, token: int, stream: int) -> float:
    """By Python integers, written from the module's docstring and SplitMix64's publication."""
    golden, low = 0x9E3779B97F4A7C15, 0xFFFFFFFF

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    key = mix((mix((seed + golden * (stream + 1)) & MASK) + position * golden) & MASK)
    word = mix((token * golden) & MASK)
    x = (word ^ key) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = (((x ^ (x >> 15)) + (word >> 32) + (key >> 32)) * 0x846CA68B) & low
    x = ((x ^ (x >> 16)) * 0x31848BAB) & low
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    return min((x + 0.5) / 2**31, 1 - 2**-24)


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
                    expected = naive_uniform(seed, position, token, stream)
                    assert float(got[i, j, k]) == pytest.approx(expected, rel=1e-6)


def test_the_noise_of_a_seed_is_pinned_for_ever() -> None:
    """A change of these numbers changes the tokens that a seed stands for. (From the naive version.)"""
    got = noise.gumbel(torch.tensor([0, 42]), torch.tensor([[1], [7]]), torch.tensor([0, 5, 49_151]))
    expected = torch.tensor([[-0.176954, -0.201782, 3.738165], [-0.9852, -0.29313, 2.100768]])
    torch.testing.assert_close(got[:, 0], expected, atol=1e-5, rtol=1e-5)
    coins = noise.coins(torch.tensor([0, 42]), torch.tensor([[1, 2], [7, 8]]), noise.ACCEPT)
    torch.testing.assert_close(coins, torch.tensor([[0.1935637, 0.4633117], [0.3350359, 0.1677249]]), atol=1e-6, rtol=0)


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


@pytest.mark.parametrize("bits", [0, 1, 2**30, 2**31 - 65, 2**31 - 1])
def test_the_extreme_hashes_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Rounding to fp32 must not give 0 or 1, where the Gumbel transform is infinite and a coin of 1 or 0 is wrong."""
    monkeypatch.setattr(noise, "_mix32", lambda x, key: torch.full((1, 1), bits, dtype=torch.int32))
    one = torch.zeros(1, dtype=torch.int64)
    value = noise.uniform(one, one[None], one, noise.TOKENS)
    assert 0 < float(value) < 1
    assert bool(noise.gumbel(one, one[None], one).isfinite())


def test_no_two_tokens_of_a_large_vocabulary_share_their_noise() -> None:
    """Gemma's 262,144 ids at three positions; equal draws at all three have a chance of 2**35 pairs / 2**72, below 1e-10.
    Ids reduced to one 32-bit word collided for 14 pairs, the less likely of which could never be drawn."""
    draws_3V = noise.uniform(torch.tensor([0]), torch.tensor([[3, 4, 5]]), torch.arange(262_144), noise.TOKENS)[0]
    assert len(draws_3V.T.unique(dim=0)) == 262_144


def test_tokens_whose_hashed_words_differ_in_one_or_two_bits_have_independent_noise(tools: SimpleNamespace) -> None:
    """The hardest pairs for the 32-bit rounds: all that SmolLM2's vocabulary has of them, up to 40, over 100,000 keys in 16 x 16
    cells; false alarm below 4e-7 in all. (Two rounds instead of three failed this with p = 0.)"""
    words = (noise._mix64(torch.arange(49_152) * noise._GOLDEN) & 0xFFFFFFFF).tolist()
    place = {word: token for token, word in enumerate(words)}
    masks = [1 << a | 1 << b for a in range(32) for b in range(a + 1)]
    pairs = [(t, place[w ^ m]) for m in masks for t, w in enumerate(words) if place.get(w ^ m, -1) > t][:40]
    assert len(pairs) == 40
    seeds, positions = torch.arange(1000), torch.arange(100).expand(1000, -1)
    for pair in pairs:
        first, second = noise.uniform(seeds, positions, torch.tensor(pair), noise.TOKENS).double().view(-1, 2).unbind(1)
        counts = torch.bincount((first * 16).long() * 16 + (second * 16).long(), minlength=256)
        assert tools.chi_square_p_value(counts, torch.full((256,), 1 / 256)) > 1e-8


def test_draws_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions, tokens = torch.arange(5), torch.arange(35).view(5, 7), torch.arange(100)
    whole = noise.gumbel(seeds, positions, tokens)
    for elements in (1, 250, 3500):
        monkeypatch.setattr(noise, "CACHED_ELEMENTS", elements)
        assert torch.equal(noise.gumbel(seeds, positions, tokens), whole)
