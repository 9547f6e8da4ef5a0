"""From logits to probabilities: one sampler for target and draft, for plain and for speculative decoding.

Order as in Hugging Face's generate (`GenerationMixin._get_logits_processor`, transformers 5.24): logit_bias,
repetition_penalty, no_repeat_ngram, bad_words, allowed, processors, temperature, top_k, top_p, min_p, typical_p. Presence and
frequency, which it does not have, stand behind repetition_penalty. Temperature 0 is a one-hot law, so greedy decoding needs no
second path anywhere; what stands before the temperature acts on it too.

Most settings treat all positions alike and work on logits of any shape (…, V). The others look at the tokens before
(`Sampler.needs_prefix`): they need a `Prefix`, and run row by row of a drafted tree (`inference.penalties`).

Letters: B sequences, R rows (root first), V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.penalties import Prefix, Processor, constrain, penalise, run


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Sampling settings; calling `log_probs` applies them. A speculative output obeys all of them as a plain one does.

    Attributes:
        temperature: 0 or more; 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024, arXiv 2407.01082); None
            keeps all.
        typical_p: keep the tokens whose surprise is nearest to the entropy until their mass reaches typical_p (Meister et al.
            2022, arXiv 2202.00666); 1 keeps all.
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies negative ones; 1 is off.
        presence_penalty: subtracted from the logit of every token in the output; 0 is off.
        frequency_penalty: subtracted once for each occurrence in the output; 0 is off.
        no_repeat_ngram: no sequence of that many tokens occurs twice, the prompt included; 0 is off.
        bad_words: token sequences that never occur. An end-of-sequence token among them is banned like any other (Hugging
            Face's generate leaves it out).
        logit_bias: pairs of a token sequence and what is added to the logit of its last token behind the others (Hugging
            Face's sequence_bias); -inf bans it.
        allowed: given prompt and output ids, the token ids that may come next. It is asked about drafted continuations too, as
            long as they obey it, also behind an end-of-sequence token (where it may return nothing).
        processors: Hugging Face's LogitsProcessor objects, or functions with that signature; called with (ids (M, L), scores
            (M, V)), M continuations of one sequence. They must compute from these alone.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    allowed: Callable[[list[int]], Sequence[int]] | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; give 1 or more, or leave it out")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a value above 0, at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; give a value from 0 to 1, or leave it out")
        if not 0 < self.typical_p <= 1:
            raise ValueError(f"typical_p is {self.typical_p}; give a value above 0, at most 1")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; give a value above 0, 1 being none")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not math.isfinite(value):
                raise ValueError(f"{name}_penalty is {value}; give a finite value, 0 being none")
        if not (isinstance(self.no_repeat_ngram, int) and self.no_repeat_ngram >= 0):
            raise ValueError(f"no_repeat_ngram is {self.no_repeat_ngram}; give a whole number, 0 being none")
        _check_sequences(self.bad_words, self.logit_bias)
        if self.allowed is not None and not callable(self.allowed):
            raise ValueError(
                f"allowed is {self.allowed!r}; give a function from token ids to the ids that may come next"
            )
        if self.processors != ():
            self._check_processors()

    def _check_processors(self) -> None:
        """Generate would silently let a processor replace a setting of the same class; one of the two has no effect."""
        from transformers import (
            NoBadWordsLogitsProcessor,
            NoRepeatNGramLogitsProcessor,
            PrefixConstrainedLogitsProcessor,
            RepetitionPenaltyLogitsProcessor,
            SequenceBiasLogitsProcessor,
        )

        if not (isinstance(self.processors, tuple) and all(callable(each) for each in self.processors)):
            raise ValueError(f"processors is {self.processors!r}; give a tuple of Hugging Face LogitsProcessor objects")
        if len({id(each) for each in self.processors}) < len(self.processors):
            raise ValueError("processors holds the same object twice; generate runs it once, so give it once")
        twins: dict[str, type] = {
            "logit_bias": SequenceBiasLogitsProcessor,
            "repetition_penalty": RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram": NoRepeatNGramLogitsProcessor,
            "bad_words": NoBadWordsLogitsProcessor,
            "allowed": PrefixConstrainedLogitsProcessor,
        }
        default = Sampler()
        for name, kind in twins.items():
            if getattr(self, name) != getattr(default, name) and any(type(each) is kind for each in self.processors):
                raise ValueError(f"processors holds a {kind.__name__} and {name} is set too; give one of them")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_prefix(self) -> bool:
        """Whether a law depends on the tokens before it by more than the logits."""
        return self._penalises or self._long_bias or self._walks

    @property
    def _penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def _long_bias(self) -> bool:
        return any(len(ids) > 1 for ids, _ in self.logit_bias)

    @property
    def _walks(self) -> bool:
        """Whether anything but a bias runs row by row."""
        return self.allowed is not None or bool(self.no_repeat_ngram or self._long_bad_words or self.processors)

    @property
    def _long_bad_words(self) -> list[tuple[int, ...]]:
        return [ids for ids in self.bad_words if len(ids) > 1]

    def drafting(self) -> "Sampler":
        """The settings that make sense for draft logits: in a vocabulary that may be reduced, and blind to tokens before."""
        blind = Sampler(self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return self if self == blind else blind

    def log_probs(self, logits: Tensor, prefix: Prefix | None = None) -> Tensor:
        """Log-probabilities of the law under these settings, same shape, fp32 (fp64 for fp64 logits); -inf where it is 0.

        Args:
            logits: (…, V), or (B, R, V) if `needs_prefix`; untouched.
            prefix: the tokens before each row; only read if `needs_prefix`.

        Raises:
            ValueError: no prefix where one is needed, token ids beyond the vocabulary, or no token left.
        """
        exact = torch.promote_types(logits.dtype, torch.float32)
        scores = self._process(logits.to(exact), prefix)
        if self.greedy:
            one_hot = torch.full_like(scores, -math.inf)
            return one_hot.scatter_(-1, most_likely(scores)[..., None], 0.0)
        temperature = max(self.temperature, torch.finfo(exact).tiny)  # below, the divisor would be 0
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # the largest is 0: no temperature overflows
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            kth = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -math.inf)
        if self.top_p < 1:
            scores = _keep_top_p(scores, self.top_p)
        if self.min_p is not None:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -math.inf)
        if self.typical_p < 1:
            scores = _keep_typical(scores, self.typical_p)
        return scores.log_softmax(-1)

    def _process(self, scores: Tensor, prefix: Prefix | None) -> Tensor:
        """All that stands before the temperature; `scores` is untouched."""
        vocab_size = scores.shape[-1]
        if self.needs_prefix:
            prefix = _check_prefix(scores, prefix)
        if self.logit_bias:
            _check_vocab("logit_bias", [ids for ids, _ in self.logit_bias], vocab_size)
            if self._long_bias:
                assert prefix is not None
                scores = run([_sequence_bias(self.logit_bias)], scores, prefix)
            else:
                bias_V = torch.zeros(vocab_size)  # fp32 as in transformers, whatever the logits are
                bias_V[[ids[0] for ids, _ in self.logit_bias]] = torch.tensor(
                    [float(bias) for _, bias in self.logit_bias]
                )
                scores = scores + bias_V.to(scores)
        if self._penalises:
            assert prefix is not None
            penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            scores = penalise(scores, prefix, *penalties)
        if self.bad_words:
            _check_vocab("bad_words", self.bad_words, vocab_size)
            banned = [ids[0] for ids in self.bad_words if len(ids) == 1]
            scores = scores.index_fill(-1, torch.tensor(banned, dtype=torch.int64, device=scores.device), -math.inf)
        if self._walks:
            assert prefix is not None
            scores = run(self._walking(), scores, prefix)
        return scores

    def _walking(self) -> list[Processor]:
        """What runs row by row behind the penalties, in order. Bad words of one token are not among it: bans commute."""
        processors: list[Processor] = []
        if self.no_repeat_ngram:
            from transformers import NoRepeatNGramLogitsProcessor

            processors.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram))
        if self._long_bad_words:
            processors.append(_sequence_bias([(ids, -math.inf) for ids in self._long_bad_words]))
        if self.allowed is not None:
            processors.append(constrain(self.allowed))
        return [*processors, *self.processors]


def log_probs(samplers: Sequence[Sampler], logits_BRV: Tensor, prefix: Prefix | None) -> Tensor:
    """`Sampler.log_probs` with one sampler per sequence, (B, R, V); sequences with equal samplers are computed together.

    Args:
        samplers: B of them.
        logits_BRV: (B, …, V), untouched.
        prefix: of all sequences; None if no sampler needs it.
    """
    assert len(samplers) == len(logits_BRV), (len(samplers), logits_BRV.shape)
    if all(sampler is samplers[0] or sampler == samplers[0] for sampler in samplers):
        return samplers[0].log_probs(logits_BRV, prefix)
    groups: dict[Sampler, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler, []).append(row)
    out_BRV = torch.empty_like(logits_BRV, dtype=torch.promote_types(logits_BRV.dtype, torch.float32))
    for sampler, rows in groups.items():
        index = torch.tensor(rows, device=logits_BRV.device)
        part = prefix.select(rows) if prefix is not None and sampler.needs_prefix else None
        out_BRV[index] = sampler.log_probs(logits_BRV[index], part)
    return out_BRV


def most_likely(scores: Tensor) -> Tensor:
    """Index of the largest score, the first of equals, int64 (…): on a CPU, argmax takes four times as long as max."""
    return scores.max(-1).indices


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Masks the least likely tokens whose total mass is at most 1 - top_p; the most likely token always stays."""
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1)
    drop = below <= 1 - top_p
    drop[..., -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def _keep_typical(scores: Tensor, typical_p: float) -> Tensor:
    from transformers import TypicalLogitsWarper

    kept: Tensor = TypicalLogitsWarper(typical_p)(None, scores.reshape(-1, scores.shape[-1]))
    return kept.view_as(scores)


def _sequence_bias(biases: Sequence[tuple[tuple[int, ...], float]]) -> Processor:
    from transformers import SequenceBiasLogitsProcessor

    processor: Processor = SequenceBiasLogitsProcessor({ids: float(bias) for ids, bias in biases})
    return processor


# ---- checks -----------------------------------------------------------------------------------------------------------


def _check_sequences(bad_words: Any, logit_bias: Any) -> None:
    def is_sequence(ids: Any) -> bool:
        return isinstance(ids, tuple) and len(ids) > 0 and all(isinstance(each, int) and each >= 0 for each in ids)

    if not (isinstance(bad_words, tuple) and all(is_sequence(ids) for ids in bad_words)):
        raise ValueError(f"bad_words is {bad_words!r}; give a tuple of tuples of token ids, like ((5,), (7, 8))")
    if not isinstance(logit_bias, tuple) or not all(
        isinstance(each, tuple) and len(each) == 2 and is_sequence(each[0]) and isinstance(each[1], float | int)
        for each in logit_bias
    ):
        raise ValueError(
            f"logit_bias is {logit_bias!r}; give a tuple of pairs of token ids and a number, like (((5,), 1.5), ((7, 8), -2.0))"
        )
    seen: set[tuple[int, ...]] = set()
    for ids, bias in logit_bias:
        if not bias < math.inf:
            raise ValueError(f"the logit_bias of {ids} is {bias}; give a finite value, or -inf to ban it")
        if ids in seen:
            raise ValueError(f"logit_bias names {ids} more than once; give one value")
        seen.add(ids)


def _check_vocab(name: str, sequences: Sequence[tuple[int, ...]], vocab_size: int) -> None:
    if (largest := max(max(ids) for ids in sequences)) >= vocab_size:
        raise ValueError(f"{name} names token {largest}; the target has 0 to {vocab_size - 1}")


def _check_prefix(logits: Tensor, prefix: Prefix | None) -> Prefix:
    if prefix is None:
        raise ValueError(
            "these sampling settings look at the tokens before; give log_probs a prefix, or use drafting()"
        )
    if logits.dim() != 3 or logits.shape[:2] != prefix.ids_BR.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for a prefix of {tuple(prefix.ids_BR.shape)} rows; give (B, R, V)"
        )
    return prefix
