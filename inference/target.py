"""The frozen target: any Hugging Face causal LM behind one small contract, its modelling code neither copied nor patched.

Hidden features come from hooks that exist only during a call; tree and chain masks are arguments; the cache is ours (`cache`).
What could silently be wrong is checked when the target is loaded: that `unembed(last)` gives the model's own logits
(soft-capping and scaling included) and that decoding with our cache gives the same logits as the model alone.

Letters: B sequences, R rows given to the target (root first), S cache slots, F captured width, D width, V vocabulary.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.drafters.base import LayerId, Shape
from draftsmith.drafters.grow import Frontier, seen_slots
from draftsmith.drafters.tree import Tree
from draftsmith.inference.cache import KVCache
from draftsmith.inference.capture import capture, grouped_attention, hook

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

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | None, name: str, *, frozen: bool = True
    ) -> None:
        """Wraps a loaded model and checks it; `load` is the usual way in.

        Args:
            model: the model.
            tokenizer: its own.
            name: how messages and reports call it.
            frozen: its weights get no gradients; those of a draft model that is being trained still do.

        Raises:
            ValueError: the model cannot be driven exactly: no head, unknown logit arithmetic, or a state without roll-back.
        """
        self.model: Any = model.eval().requires_grad_(False) if frozen else model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.config: Any = model.config.get_text_config()
        _refuse_other_states(model, self.config, name)
        _refuse_moving_rope(self.config, name)
        self.body: nn.Module = getattr(model, model.base_model_prefix)
        self.layers = _decoder_layers(self.body, self.config.num_hidden_layers)
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
        self.shape = describe(self.config, vocab_size=head.weight.shape[0], fingerprint=fingerprint(model))
        self.eos_ids = _eos_ids(model, tokenizer)
        self._check()

    @property
    def adapted_from(self) -> dict[str, Any] | None:
        """Of a target that training adapted: `path` and `fingerprint` of the original, and how far it is from that."""
        return _setting(self.model.config, ADAPTED_FROM)

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
        scaling, scale = _setting(self.config, "logits_scaling"), _setting(self.config, "logit_scale")
        cap = _setting(self.config, "final_logit_softcapping")
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
            mask_BRS, key_positions_BS = _visible(slots.index_BR, slots.extent, tree)
        mask = self._attention_mask(mask_BRS, positions_BR, key_positions_BS)
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

    def _attention_mask(self, mask_BRS: Tensor, positions_BR: Tensor, key_positions_BS: Tensor) -> Any:
        """The mask in the form the model takes: bool or additive, and one per layer type where types differ."""
        window = _setting(self.config, "sliding_window")
        types = set(_setting(self.config, "layer_types") or ())
        if _setting(self.config, "use_sliding_window") is False:
            window = None
        full = self._mask_dtype(mask_BRS[:, None])
        if window is None:
            return full if not types or types == {"full_attention"} else dict.fromkeys(types, full)
        near_BRS = positions_BR[..., None] - key_positions_BS[:, None] < window
        sliding = self._mask_dtype((mask_BRS & near_BRS)[:, None])
        if types == {"full_attention", "sliding_attention"}:
            return {"full_attention": full, "sliding_attention": sliding}
        return full if types == {"full_attention"} else sliding

    def _mask_dtype(self, visible: Tensor) -> Tensor:
        if self.config._attn_implementation != "eager":
            return visible
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

    def _check(self) -> None:
        """Two promises that everything rests on, tried on random tokens; ValueError names the one that fails."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.shape.vocab_size, (1, 12), generator=generator).to(self.device)
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.25
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


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Loads a target from a folder, a hub id, or a GGUF file.

    Args:
        path: the folder, id or `.gguf` file.
        dtype: of weights and activations; None takes the checkpoint's own (fp32 for GGUF).
        device: where to put it.
        device_map: how to spread it over all devices instead, "auto", "balanced" or "sequential" (accelerate's names).
        revision: of a hub id.
        trust_remote_code: run modelling code that comes with the checkpoint; only ever on the user's explicit request.

    Raises:
        ValueError: nothing there, not a causal LM, or an architecture that cannot be driven exactly.
    """
    place, extra = _source(path)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, **extra}
    try:
        config = AutoConfig.from_pretrained(place, **common)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target {str(path)!r} cannot be read: {_first_line(error)}") from error
    if not trust_remote_code and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"target {str(path)!r} is a {config.model_type!r} model, not a causal LM; give a text decoder")
    architectures = config.architectures or []
    if architectures and not any("CausalLM" in name or "LMHead" in name for name in architectures):
        raise ValueError(f"target {str(path)!r} is a {architectures[0]}, not a causal LM; give a text decoder")
    if extra:
        from transformers import GgufConfig

        common["quantization_config"] = GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype or "auto", use_safetensors=True, device_map=device_map, **common
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target {str(path)!r} cannot be loaded: {_first_line(error)}") from error
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    if device_map is None:
        return Target(model.to(device), tokenizer, str(path))
    _refuse_offloaded(model, str(path))
    return Target(model, tokenizer, str(path))


def load_tokenizer(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, for work that needs no weights; arguments and errors as of `load`."""
    place, extra = _source(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer of target {str(path)!r} cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def describe(config: Any, *, vocab_size: int | None = None, fingerprint: str = "") -> Shape:
    """A target's sizes from its Hugging Face config; works without weights."""
    heads = config.num_attention_heads
    rope = _setting(config, "rope_parameters") or {}
    if "rope_theta" not in rope:  # one entry per layer type: the full-attention one sets the scale
        rope = rope.get("full_attention", {})
    return Shape(
        hidden_size=config.hidden_size,
        vocab_size=vocab_size or config.vocab_size,
        num_layers=config.num_hidden_layers,
        intermediate_size=_setting(config, "intermediate_size") or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=_setting(config, "num_key_value_heads") or heads,
        head_dim=_setting(config, "head_dim") or config.hidden_size // heads,
        rms_norm_eps=float(_setting(config, "rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or _setting(config, "rope_theta") or 10000.0),
        max_positions=config.max_position_embeddings,
        fingerprint=fingerprint,
    )


def fingerprint(model: nn.Module) -> str:
    """Names the weights: a hash of names, sizes and sixteen bf16 samples of every parameter, the same for every dtype
    that a bf16 checkpoint is loaded in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // 16)][:16].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _visible(index_BR: Tensor, extent: int, tree: Tree) -> tuple[Tensor, Tensor]:
    """Which cache slots each new row sees, bool (B, R, S), and the position of the token in each slot, int64 (B, S)."""
    batch, num_rows = index_BR.shape
    behind_BS = torch.arange(extent, device=index_BR.device) - index_BR[:, :1]
    new_BS = behind_BS.clamp(0, num_rows - 1)  # which new row a slot holds, where it holds one
    fresh_BS = (behind_BS >= 0) & (behind_BS < num_rows)
    ancestors_BRR = tree.ancestors_bRR.expand(batch, -1, -1)
    seen_BRS = ancestors_BRR.gather(2, new_BS[:, None].expand(-1, num_rows, -1)) & fresh_BS[:, None]
    depth_BS = torch.where(fresh_BS, tree.depth_bR.expand(batch, -1).gather(1, new_BS), behind_BS)
    return (behind_BS < 0)[:, None] | seen_BRS, index_BR[:, :1] + depth_BS


def _refuse_other_states(model: nn.Module, config: Any, name: str) -> None:
    """ValueError if some layer is not plain attention, full or in a sliding window."""
    others = set(_setting(config, "layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others or getattr(model, "_is_stateful", False):  # transformers' own mark of recurrent models
        raise ValueError(
            f"{name} is a {config.model_type!r} model whose layers ({', '.join(sorted(others)) or 'recurrent'}) keep a state "
            "that cannot be rolled back, so rejected drafts could not be taken back; use a target with plain attention"
        )


def _refuse_moving_rope(config: Any, name: str) -> None:
    """ValueError if rotary frequencies depend on the longest row of a call: neighbours and drafts would change a row."""
    rope = _setting(config, "rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"{name} has rotary positions of type {rope['rope_type']!r}, which change with the length of the batch, so "
            "speculative decoding would not be exact; use a target with fixed rotary frequencies"
        )


def _refuse_offloaded(model: nn.Module, name: str) -> None:
    """ValueError if a device map left weights on the disk or in main memory, to be fetched at every pass."""
    homeless = sum(parameter.is_meta for parameter in model.parameters())
    if homeless:
        raise ValueError(
            f"{name} does not fit on the devices: {homeless} of its tensors are offloaded; give more devices or a smaller dtype"
        )


def _decoder_layers(body: nn.Module, num_layers: int) -> nn.ModuleList:
    lists = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if len(lists) != 1:
        raise ValueError(
            f"{type(body).__name__} has no single list of {num_layers} decoder layers; it is not supported"
        )
    return lists[0]


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    configured = model.generation_config.eos_token_id
    ids = set(configured) if isinstance(configured, list) else {configured}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))


def _setting(config: Any, name: str) -> Any:
    """A setting that only some architectures have."""
    return getattr(config, name, None)


def _source(path: str | Path) -> tuple[str, dict[str, str]]:
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"target {str(path)!r} does not exist")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"target {str(path)!r} has no config.json; give a model folder, a hub id or a .gguf file")
    return str(path), {}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
