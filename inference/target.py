"""The frozen target: any Hugging Face causal LM behind one small contract, its modelling code neither copied nor patched.

Hidden features come from hooks that exist only during a call; tree and chain masks are arguments; the cache is ours (`cache`).
What could silently be wrong is checked when the target is loaded: that `unembed(last)` gives the model's own logits
(soft-capping and scaling included) and that decoding with our cache gives the same logits as the model alone.

Letters: B sequences, R rows given to the target (root first), S cache slots, F captured width, D width, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.base import LayerId
from draftsmith.drafters.grow import Frontier, seen_slots
from draftsmith.drafters.tree import Tree
from draftsmith.inference.architecture import (
    decoder_layers,
    describe,
    fingerprint,
    refuse_moving_rope,
    refuse_other_states,
    setting,
)
from draftsmith.inference.cache import KVCache
from draftsmith.inference.capture import capture, grouped_attention, hook
from draftsmith.inference.form import PLAIN, Form
from draftsmith.inference.masks import attention_mask, visible
from draftsmith.inference.placement import Lockstep, Sharding, shard

ADAPTED_FROM = "draftsmith_adapted_from"
"""The key of a model's config.json that says so."""


class TargetOutput(NamedTuple):
    """What one forward gives.

    Attributes:
        logits: (B, R, V) in the model's dtype, or (B, 1, V) for the asked rows only.
        features: (B, R, F), the asked layers side by side.
        last: (B, R, D), the state after the final norm.
    """

    logits: Tensor
    features: Tensor
    last: Tensor


class Target:
    """A causal LM in eval mode without gradients; no call changes its weights, flags or config."""

    lockstep: Lockstep | None = None
    """Of a sharded target, the processes that must run equally many passes."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        *,
        frozen: bool = True,
        form: Form = PLAIN,
    ) -> None:
        """Wraps a loaded model and checks it; `load_target.load` is the usual way in.

        Args:
            model: the model.
            tokenizer: its own.
            name: how messages and reports call it.
            frozen: its weights get no gradients; those of a draft model that is being trained still do.
            form: what was done to the weights of its checkpoint.

        Raises:
            ValueError: the model cannot be driven exactly: no head, unknown logit arithmetic, or a state without roll-back.
        """
        self.model: Any = model.eval().requires_grad_(False) if frozen else model.eval()
        self.tokenizer = tokenizer
        self.name, self.form = name, form
        self.config: Any = model.config.get_text_config()
        refuse_other_states(model, self.config, name)
        refuse_moving_rope(self.config, name)
        self.body: nn.Module = getattr(model, model.base_model_prefix)
        self.layers = decoder_layers(self.body, self.config.num_hidden_layers)
        parameters = inspect.signature(self.body.forward).parameters
        self._compiled: Callable[..., Any] | None = None
        self._kept: dict[LayerId, Tensor] = {}  # what the hooks of a compiled model saw last
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        if head is None or embedding is None:
            raise ValueError(f"{name} has no output head or no input embedding; give a causal LM")
        self._head: nn.Linear = head
        self._embedding: nn.Embedding = embedding
        self.shape = describe(
            self.config, vocab_size=head.weight.shape[0], fingerprint=form.fingerprint or fingerprint(model)
        )
        self.eos_ids = _eos_ids(model, tokenizer)
        self._check()

    @property
    def adapted_from(self) -> dict[str, Any] | None:
        """Of a target that training adapted: `path` and `fingerprint` of the original, and how far it is from that."""
        return setting(self.model.config, ADAPTED_FROM)

    @property
    def not_plain(self) -> str | None:
        """Why nothing can be cut out of its decoder layers or put beside them, as half a sentence; None if they are plain."""
        if self.lockstep is not None:
            return f"{self.name} is sharded over the processes (give target.placement: replicated)"
        return self.form.not_plain(self.name)

    def shard(self, sharding: Sharding, device: torch.device) -> None:
        """Shares its decoder layers out among the processes; see `placement`."""
        self.lockstep = shard(self.model, self.layers, sharding, device)

    @property
    def device(self) -> torch.device:
        """Where ids go and states come from: that of the embedding, wherever the layers are."""
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    @property
    def bytes_per_token(self) -> int:
        """What the cache keeps per token of text."""
        return self.shape.kv_bytes(self.shape.num_layers, self.dtype.itemsize)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding, (…) → (…, D), without any scaling that the model applies afterwards."""
        return nn.functional.embedding(ids, self._embedding.weight)

    def unembed(self, last: Tensor) -> Tensor:
        """Logits (…, V) from states after the final norm (…, D), exactly as the model makes them."""
        return self.adjust_logits(self._head(last).to(last.device))

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """What some architectures do to each logit after the head: scaling and soft-capping."""
        scaling, scale = setting(self.config, "logits_scaling"), setting(self.config, "logit_scale")
        cap = setting(self.config, "final_logit_softcapping")
        if scaling is not None:  # Granite
            logits = logits / scaling
        if scale is not None:  # Cohere
            logits = logits * scale
        if cap is not None:  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    def head_weight(self) -> Tensor:
        """(V, D) on the target's device (a copy if the head is on another); drafters start from it."""
        return self._head.weight.to(self.device)

    def drive(self, model: Any) -> "Target":
        """A draft model behind the same contract, put in eval mode; its weights may still be trained."""
        return Target(model, None, "the draft model", frozen=False)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(batch, capacity)

    def compile(self, layers: Iterable[LayerId] = (), backend: str = "inductor") -> None:
        """Compiles the decoder for decoding (`torch.compile`, any batch, width and length), with hooks that stay on the layers
        that will ever be asked for. Costs a minute or so at the first pass of each form (one row, several; equal and ragged
        lengths)."""
        if self._compiled is not None:
            raise ValueError(f"{self.name} is compiled already")
        hook(self.layers, set(layers), self._kept)
        self._compiled = torch.compile(self.body.forward, dynamic=True, backend=backend)

    @torch.inference_mode()
    def forward(
        self,
        ids_BR: Tensor,
        cache: KVCache,
        layers: Sequence[LayerId] = (),
        *,
        tree: Tree | None = None,
        logits_at_B: Tensor | None = None,
        frontier: Frontier | None = None,
        behind: int = 0,
    ) -> TargetOutput:
        """One pass over R new rows per sequence, behind what the cache has committed. Commit afterwards.

        Args:
            ids_BR: int64, the root first.
            cache: where keys and values go; row b's rows get positions from `cache.lengths[b]` on.
            layers: which hidden states to return as features.
            tree: how the rows hang together; None means a chain.
            logits_at_B: compute logits for this one row of each sequence only (prefill); None means all rows.
            frontier: the rows are nodes that a draft model expands, the root committed; excludes `tree`. Not to be committed.
            behind: uncommitted rows of earlier calls, behind which these go: the nodes expanded so far.
        """
        slots = cache.begin(ids_BR.shape[1], ids_BR.device, behind)
        slots_S = torch.arange(slots.extent, device=ids_BR.device)
        if frontier is not None and frontier.visible_bMA is not None:
            lengths_B = slots.index_BR[:, 0] - behind
            positions_BR = (lengths_B + frontier.depth - 1)[:, None].expand_as(ids_BR)
            mask_BRS = seen_slots(lengths_B, slots.extent, frontier)
            key_positions_BS = slots_S.expand(len(ids_BR), -1)  # of nodes too late, so that no window leaves one out
        elif tree is None or tree.is_chain:
            positions_BR = slots.index_BR
            mask_BRS, key_positions_BS = slots_S <= positions_BR[..., None], slots_S.expand(len(ids_BR), -1)
        else:
            positions_BR = slots.index_BR[:, :1] + tree.depth_bR
            mask_BRS, key_positions_BS = visible(slots.index_BR, slots.extent, tree)
        mask = attention_mask(self.config, self.dtype, mask_BRS, positions_BR, key_positions_BS)
        known_BR = positions_BR.clamp_max(self.shape.max_positions - 1)  # drafts may reach beyond; none of them is kept
        features, last = self._run(ids_BR, layers, position_ids=known_BR, attention_mask=mask, cache=cache)
        rows = last if logits_at_B is None else last[torch.arange(len(last)), logits_at_B][:, None]
        return TargetOutput(self.unembed(rows), features, last)

    @torch.no_grad()
    def hidden(self, ids_BT: Tensor, layers: Sequence[LayerId] = ()) -> tuple[Tensor, Tensor]:
        """Features (B, T, F) and last states (B, T, D) of right-padded sequences, without a cache; padding sees but is not seen."""
        return self._run(ids_BT, layers, position_ids=None, attention_mask=None, cache=None)

    def _run(
        self, ids: Tensor, layers: Sequence[LayerId], *, position_ids: Tensor | None, attention_mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        arguments = {self._cache_argument: cache, "use_cache": cache is not None}
        run: Callable[..., Any] = self.body
        hooks: AbstractContextManager[dict[LayerId, Tensor]] = capture(self.layers, layers)
        if self._compiled is not None and cache is not None:
            run, hooks = self._compiled, nullcontext(self._kept)
        with hooks as captured, grouped_attention(self.device):
            out = run(input_ids=ids, position_ids=position_ids, attention_mask=attention_mask, **arguments)
        last: Tensor = out.last_hidden_state.to(ids.device)  # a model may be spread over several devices
        chosen = [last if layer == "last" else captured[layer].to(ids.device) for layer in layers]
        return torch.cat(chosen, dim=-1) if chosen else last[..., :0], last

    def _check(self) -> None:
        """Two promises that everything rests on, tried on random tokens; ValueError names the one that fails."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.shape.vocab_size, (1, 12), generator=generator).to(self.device)
        # Products of eight bits are summed in fp16, and which columns are left out of them depends on all rows of a call.
        exact = self.dtype in (torch.float32, torch.float64) and self.form.quantisation is None
        tolerance = 1e-3 if exact else 0.25
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits
            _, last = self.hidden(ids)
            if not torch.allclose(self.unembed(last), logits, atol=1e-4 if tolerance < 0.1 else tolerance, rtol=1e-2):
                gap = float((self.unembed(last) - logits).abs().max())
                raise ValueError(
                    f"{self.name}: the head on the last hidden state does not reproduce the model's logits (off by "
                    f"{gap:.3g}); this architecture ({type(self.model).__name__}) is not supported"
                )
            cache = self.new_cache(1, 16)
            parts = []
            for piece in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
                parts.append(self.forward(piece, cache).logits)
                cache.commit([piece.shape[1]])
        missing = set(range(len(self.layers))) - cache.used_layers()
        if missing:
            raise ValueError(
                f"{self.name}: layers {sorted(missing)} keep a state that cannot be rolled back (recurrent or linear "
                "attention), so rejected drafts could not be taken back; use a target with plain attention"
            )
        gap = float((torch.cat(parts, 1) - logits).abs().max())
        if not gap <= tolerance * max(1.0, float(logits.abs().max())):
            raise ValueError(
                f"{self.name}: decoding with the cache gives other logits than the model alone (off by {gap:.3g}); "
                f"this architecture ({type(self.model).__name__}) is not supported"
            )


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = set(configured) if isinstance(configured, list) else {configured}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))
