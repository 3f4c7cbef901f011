"""The MTP head a second time: one sequence, one row after the other, lists for caches.

Written from the equations alone, with no call into the package, so that both can be wrong only in
different ways. The table of cosines and sines is the model's; it has tests of its own.
"""

import torch
from torch import Tensor

from outrider.models.qwen4_exp.model import Qwen4ExpForCausalLM


def rms(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """x / rms(x) * (1 + weight), each of the groups with a mean of its own."""
    parts = [part / (part.pow(2).mean() + eps).sqrt() for part in x.chunk(groups)]
    return torch.cat(parts) * (1 + weight)


class PlainHead:
    """One sequence's head.

    Args:
        model: whose weights it has.
    """

    def __init__(self, model: Qwen4ExpForCausalLM) -> None:
        self.config = model.config
        self.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.cos, self.sin = model.rotary.cos, model.rotary.sin
        num_layers = len({name.split(".")[2] for name in self.weights if "mtp.layers." in name})
        # Per layer: position -> (keys [Hk, D], values [Hk, D], raw index key [dI]).
        self.caches: list[dict[int, tuple[Tensor, Tensor, Tensor]]] = [
            {} for _ in range(num_layers)
        ]
        self.norm_groups = 1
        self.attended: list[int] = []

    def run(
        self,
        streams: Tensor,
        token_id: int,
        position: int,
        layer: int = 0,
        listed: list[int] | None = None,
    ) -> Tensor:
        """One row: streams [W] at a position and the token after it, to the head's streams [W].

        Args:
            streams: [W], of the trunk or of the row before.
            token_id: the token that follows the streams' position.
            position: place of the row; what lay there and after it is forgotten.
            layer: of the head.
            listed: positions to attend to in place of the indexer's.
        """
        prefix = f"mtp.layers.{layer}."
        x = self._fuse(streams, token_id)
        hidden, normed = self._read(prefix + "attn_hyper_connection.", x)
        mixed = self._attend(prefix + "self_attn.", hidden, position, self.caches[layer], listed)
        x = self._inject(prefix + "attn_hyper_connection.", x, normed, mixed)
        hidden, normed = self._read(prefix + "mlp_hyper_connection.", x)
        return self._inject(
            prefix + "mlp_hyper_connection.", x, normed, self._experts(prefix + "mlp.", hidden)
        )

    def mixed(self, streams: Tensor) -> Tensor:
        """The head's final mixer: [W] to [C]."""
        return self._read("mtp.hyper_connection_mixer.", streams)[0]

    def logits(self, streams: Tensor) -> Tensor:
        """[W] to [V]; the vocabulary head is the trunk's."""
        return self.weights["lm_head.weight"] @ self.mixed(streams)

    def _fuse(self, streams: Tensor, token_id: int) -> Tensor:
        w, eps = self.weights, self.config.rms_norm_eps
        embedded = w["model.embed_tokens.weight"][token_id]
        token = w["mtp.fc_embedding.weight"] @ rms(
            embedded, w["mtp.pre_fc_norm_embedding.weight"], eps
        )
        normed = rms(streams, w["mtp.pre_fc_norm_hidden.weight"], eps, self.norm_groups)
        parts = normed.chunk(self.config.hc_count)
        return torch.cat([token + w["mtp.fc_hidden.weight"] @ part for part in parts])

    def _read(self, prefix: str, streams: Tensor) -> tuple[Tensor, Tensor]:
        w, num_streams = self.weights, self.config.hc_count
        normed = rms(
            streams, w[prefix + "hc_norm.weight"], self.config.rms_norm_eps, groups=num_streams
        )
        mix = w[prefix + "input_mix_weight_down.weight"] @ normed / num_streams
        gate = (w[prefix + "input_mix_weight_up.weight"] @ (mix * mix.sigmoid())).sigmoid()
        parts = (gate * normed).chunk(num_streams)
        return sum(parts, torch.zeros(())) / num_streams, normed

    def _inject(self, prefix: str, streams: Tensor, normed: Tensor, output: Tensor) -> Tensor:
        num_streams = self.config.hc_count
        gate = self.weights[prefix + "block_inject_weight.weight"] @ normed / num_streams
        parts = streams.chunk(num_streams)
        return torch.cat(
            [part + 2 * g.sigmoid() * output for part, g in zip(parts, gate, strict=True)]
        )

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.config.rotary_dim // 2
        cos, sin = self.cos[position], self.sin[position]
        a, b = x[:half], x[half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[2 * half :]])

    def _attend(
        self,
        prefix: str,
        hidden: Tensor,
        position: int,
        cache: dict[int, tuple[Tensor, Tensor, Tensor]],
        listed: list[int] | None,
    ) -> Tensor:
        w, config = self.weights, self.config
        eps, dim, heads = config.rms_norm_eps, config.head_dim, config.num_attention_heads
        projected = (w[prefix + "q_proj.weight"] @ hidden).view(heads, 2 * dim)
        keys = (w[prefix + "k_proj.weight"] @ hidden).view(-1, dim)
        values = (w[prefix + "v_proj.weight"] @ hidden).view(-1, dim)
        index = w[prefix + "indexer.index_qk_proj.weight"] @ hidden
        index_queries, raw_key = (
            index[: -config.indexer_head_dim],
            index[-config.indexer_head_dim :],
        )
        k_norm = w[prefix + "k_norm.weight"]
        rotated = [self._rotate(rms(key, k_norm, eps), position) for key in keys]
        for later in [place for place in cache if place >= position]:
            del cache[later]
        cache[position] = (torch.stack(rotated), values, raw_key)
        if listed is None:
            listed = self._select(prefix + "indexer.", index_queries, position, cache)
        self.attended = listed
        group = heads // config.num_key_value_heads
        outputs = []
        for head in range(heads):
            query = rms(projected[head, :dim], w[prefix + "q_norm.weight"], eps)
            query = self._rotate(query, position)
            scores = [query @ cache[place][0][head // group] / dim**0.5 for place in listed]
            weights = torch.stack(scores).softmax(0)
            output = sum(
                (
                    p * cache[place][1][head // group]
                    for p, place in zip(weights, listed, strict=True)
                ),
                torch.zeros(()),
            )
            outputs.append(output * projected[head, dim:].sigmoid())
        return w[prefix + "o_proj.weight"] @ torch.cat(outputs)

    def _select(
        self,
        prefix: str,
        queries: Tensor,
        position: int,
        cache: dict[int, tuple[Tensor, Tensor, Tensor]],
    ) -> list[int]:
        """The positions of the best complete blocks, and those after the last complete block."""
        w, config = self.weights, self.config
        ratio, eps = config.indexer_compress_ratio, config.rms_norm_eps
        num_blocks = (position + 1) // ratio
        scores = []
        for block in range(num_blocks):
            places = range(block * ratio, (block + 1) * ratio)
            mean = sum((cache[place][2] for place in places), torch.zeros(())) / ratio
            key = self._rotate(rms(mean, w[prefix + "k_layernorm.weight"], eps), block * ratio)
            score = 0.0
            for query in queries.chunk(config.indexer_n_heads):
                normed = rms(query, w[prefix + "q_layernorm.weight"], eps)
                score += max(float(self._rotate(normed, position) @ key), 0.0)
            scores.append(score)
        best = sorted(range(num_blocks), key=lambda block: (-scores[block], block))
        chosen = sorted(best[: config.indexer_budget // ratio])
        inside = [block * ratio + i for block in chosen for i in range(ratio)]
        return inside + list(range(num_blocks * ratio, position + 1))

    def _experts(self, prefix: str, hidden: Tensor) -> Tensor:
        w, config = self.weights, self.config
        probs = (w[prefix + "gate.weight"] @ hidden).softmax(0).tolist()
        order = sorted(range(config.num_experts), key=lambda expert: (-probs[expert], expert))
        chosen = order[: config.num_experts_per_tok]
        total = sum(probs[expert] for expert in chosen) if config.norm_topk_prob else 1.0
        output = torch.zeros_like(hidden)
        for expert in chosen:
            gate, up = (w[prefix + "experts.gate_up_proj"][expert] @ hidden).chunk(2)
            down = w[prefix + "experts.down_proj"][expert] @ (gate * gate.sigmoid() * up)
            output = output + probs[expert] / total * down
        gate = w[prefix + "shared_expert.gate_proj.weight"] @ hidden
        up = w[prefix + "shared_expert.up_proj.weight"] @ hidden
        shared = w[prefix + "shared_expert.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        share = (w[prefix + "shared_expert_gate.weight"] @ hidden).sigmoid()
        return output + share * shared
