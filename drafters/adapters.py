"""Low-rank adapters on a copy of the target that shares the original's weights (LoRA, Hu et al. 2021, arXiv 2106.09685).

The copy is a second tree of modules over the same parameters: it costs no memory, and nothing of the original (weights, flags,
hooks, config) changes. peft puts the adapters in and merges them; the output head and the embedding are never adapted, so
both targets turn a state into logits in the same way.

Letters: B sequences, T positions, D width, n rows, c rows of a chunk, V vocabulary.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from draftsmith.drafters.base import TargetHead
from draftsmith.drafters.fused import CHUNK_ELEMENTS
from draftsmith.drafters.settings import nearest
from draftsmith.drafters.unpack import recompute_layers


class AdaptedTarget:
    """The target with adapters that start as nothing. No module itself: the frozen weights are not its owner's parameters.

    Attributes:
        parameters: the adapters' factors by name, trainable.
    """

    def __init__(self, model: Any, rank: int, alpha: float, names: tuple[str, ...] = ()) -> None:
        """Puts adapters beside linear layers of the decoder.

        Args:
            model: the Hugging Face model of the original target.
            rank: of the products B A that are added to the weights.
            alpha: they are scaled by alpha / rank.
            names: last parts of the layers' names ("q_proj"); none means every linear layer of the decoder.

        Raises:
            ValueError: peft is missing, or the decoder has no linear layer of a name.
        """
        try:
            from peft import LoraConfig, LoraModel
        except ImportError as error:
            raise ValueError(
                f"adapting a target needs peft ({error}); install draftsmith[lora], or peft alone"
            ) from error
        body = getattr(model, model.base_model_prefix)
        linear = {name.rsplit(".", 1)[-1]: module for name, module in linear_layers(body).items()}
        for name in names:
            if name not in linear:
                raise ValueError(f"adapt_modules has {name!r}, no linear layer of the decoder; {nearest(name, linear)}")
        chosen = list(names or linear)
        transposed = are_transposed(linear[name] for name in chosen)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, fan_in_fan_out=transposed)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._lora = LoraModel(copy.deepcopy(model, shared), config, "default")
        self.parameters = {
            name.removeprefix("model.").removesuffix(".default.weight"): parameter
            for name, parameter in self._lora.named_parameters()
            if parameter.requires_grad
        }

    def recompute(self, on: bool) -> None:
        """Activation checkpointing of its layers; they ask for training mode, and no dropout inside them may wake up."""
        for layer in recompute_layers(self._lora.model, on):
            layer.training = on

    def last(self, ids_BT: Tensor) -> Tensor:
        """States after the final norm (B, T, D) of right-padded sequences, with gradient towards the adapters."""
        model = self._lora.model
        out = getattr(model, model.base_model_prefix)(input_ids=ids_BT, use_cache=False)
        last_BTD: Tensor = out.last_hidden_state
        return last_BTD

    @torch.no_grad()
    def merged(self) -> Any:
        """A model of its own with the adapters added to its weights; rounded to their dtype, as it will be served."""
        return copy.deepcopy(self._lora).merge_and_unload().requires_grad_(False)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its name, GPT-2's among them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def are_transposed(layers: Iterable[nn.Module]) -> bool:
    """Whether weights are kept as (inputs, outputs), as GPT-2 does."""
    return any(isinstance(layer, Conv1D) for layer in layers)


def compare(original_nD: Tensor, adapted_nD: Tensor, target: TargetHead) -> tuple[Tensor, Tensor, Tensor]:
    """What adapting did to the law at n rows; logits exist for a chunk of rows at a time and are made anew for the gradient.

    Args:
        original_nD: states of the original target after the final norm.
        adapted_nD: those of the adapted one.
        target: the original; its head turns both into logits.

    Returns:
        KL(original ‖ adapted) with gradient towards `adapted_nD`; log-normaliser and argmax of the adapted law, without.
        (n) each; fp32, or fp64 for fp64 states, and int64.
    """
    size = max(
        1, CHUNK_ELEMENTS // 2 // target.shape.vocab_size
    )  # several matrices of a chunk are kept for the gradient

    def chunk(original_cD: Tensor, adapted_cD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        original_cV, logits_cV = (_wide(target.unembed(last_cD)) for last_cD in (original_cD, adapted_cD))
        log_original_cV, log_adapted_cV = original_cV.log_softmax(1), logits_cV.log_softmax(1)
        kl_c = (log_original_cV.exp() * (log_original_cV - log_adapted_cV)).sum(1)
        return kl_c, logits_cV.detach().logsumexp(1), logits_cV.argmax(1)

    parts = [
        checkpoint(chunk, *pair, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(original_nD.split(size), adapted_nD.split(size), strict=True)
    ]
    kl_n, normaliser_n, argmax_n = map(torch.cat, zip(*parts, strict=True))
    return kl_n, normaliser_n, argmax_n


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
