"""The arithmetic behind `antiphon plan`: parameters as the models themselves have them, memory by hand, which shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from antiphon_engine.parallel import ParallelShape, check_shape, kv_part, tensor_sizes
from antiphon_engine.planning import (
    DEMO_CONFIG,
    DEVICES,
    ConfigRefused,
    DeviceRefused,
    ModelConfig,
    Plan,
    Question,
    QuestionRefused,
    Reserve,
    count_parameters,
    plan_shapes,
    rank_parameters,
    read_config,
    read_fleet,
    shape_memory,
)
from antiphon_engine.planning.parameters import count_active_parameters
from antiphon_engine.torch_engine.memory_estimate import kv_shape
from antiphon_engine.torch_engine.parallel.cuts import rank_cuts
from antiphon_engine.torch_engine.parallel.skeleton import build_skeleton
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import demo_model

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""Elements of all tensors in the files that the publishers give out."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}
TINY_MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "llama, tied": ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("LlamaForCausalLM", "llama", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", "mistral", {}),
    "mixtral": ("MixtralForCausalLM", "mixtral", TINY_MOE),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    "qwen3, biases, default heads": ("Qwen3ForCausalLM", "qwen3", {"attention_bias": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe", TINY_MOE | {"head_dim": 16}),
    "qwen3_moe, dense layers": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        TINY_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 3},
    ),
}


def published(name: str) -> ModelConfig:
    return read_config((CONFIGS / f"{name}.json").read_bytes(), name)


def on_paper(config: dict[str, Any]) -> torch.nn.Module:
    """The model itself, without storage."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return model


def elements(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def plan(name: str, gpus: str, *, per_node: int = 0, **more: Any) -> Plan:
    return plan_shapes(Question(published(name), read_fleet(gpus, gpus_per_node=per_node), **more))


# -- parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_their_files_hold(name: str) -> None:
    assert count_parameters(published(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-3.2-1b", "mixtral-8x7b-v0.1", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_published_models_have_the_parameters_that_the_library_gives_them(name: str) -> None:
    assert elements(on_paper(json.loads((CONFIGS / f"{name}.json").read_text()))) == PUBLISHED[name]


@pytest.mark.parametrize("variant", VARIANTS)
def test_biases_norms_ties_and_dense_layers_are_counted_as_the_library_does(variant: str) -> None:
    architecture, kind, more = VARIANTS[variant]
    written = TINY | {"architectures": [architecture], "model_type": kind} | more
    assert count_parameters(read_config(json.dumps(written).encode(), variant)) == elements(on_paper(written))


def test_of_a_mixture_a_token_goes_through_its_experts_only() -> None:
    assert count_active_parameters(published("qwen3-30b-a3b")) == pytest.approx(3.3e9, rel=0.02)
    assert count_active_parameters(published("mixtral-8x7b-v0.1")) == pytest.approx(12.9e9, rel=0.01)


def test_tensor_ranks_share_matrices_and_each_has_the_norms() -> None:
    config = published("llama-3.1-8b")
    whole, half = count_parameters(config), rank_parameters(config, ParallelShape(tensor=2), 0)
    everywhere = (2 * config.layers + 1) * config.hidden
    assert half == everywhere + (whole - everywhere) // 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rank_that_holds_most_holds_what_the_engine_loads_into_it(variant: str) -> None:
    architecture, kind, more = VARIANTS[variant]
    written = TINY | {"architectures": [architecture], "model_type": kind} | more
    library, config = AutoConfig.for_model(**written), read_config(json.dumps(written).encode(), variant)
    shapes = [ParallelShape(2), ParallelShape(8), ParallelShape(1, 3), ParallelShape(4, 2)]
    shapes += [ParallelShape(4, 1, 4)] if config.experts else []
    for shape in shapes:
        for stage in range(shape.pipeline):
            ranks = range(stage * shape.tensor, (stage + 1) * shape.tensor)
            loaded = [sum(cut.count for cut in rank_cuts(build_skeleton(library, shape, rank))) for rank in ranks]
            assert rank_parameters(config, shape, stage) == max(loaded), (str(shape), stage)


def test_ranks_beyond_the_kv_heads_hold_copies_of_their_projections() -> None:
    config = published("qwen3-30b-a3b")
    four, eight = (rank_parameters(config, ParallelShape(tensor=size), 0) for size in (4, 8))
    one_head = 2 * config.hidden * config.head_dim * config.layers
    everywhere = config.hidden
    everywhere += config.layers * (2 * config.hidden + 2 * config.head_dim + config.experts * config.hidden)
    assert four - everywhere - one_head == 2 * (eight - everywhere - one_head)


def test_experts_take_the_same_memory_cut_or_dealt_out() -> None:
    config = published("qwen3-30b-a3b")
    assert rank_parameters(config, ParallelShape(4, 1, 4), 0) == rank_parameters(config, ParallelShape(4, 1, 1), 0)


def test_stages_hold_their_layers_and_the_outer_ones_embedding_and_head() -> None:
    config = published("llama-3.1-8b")
    shape = ParallelShape(pipeline=4)
    stages = [rank_parameters(config, shape, stage) for stage in range(4)]
    assert sum(stages) == count_parameters(config)
    assert stages[0] - stages[1] == config.vocab * config.hidden
    assert stages[3] - stages[2] == config.vocab * config.hidden + config.hidden


def test_a_tied_head_in_another_stage_is_a_second_copy() -> None:
    config = published("llama-3.2-1b")
    whole = sum(rank_parameters(config, ParallelShape(pipeline=2), stage) for stage in range(2))
    assert whole == count_parameters(config) + config.vocab * config.hidden


# -- memory


def test_the_memory_of_a_rank_adds_up() -> None:
    config, shape = published("llama-3.1-70b"), ParallelShape(tensor=4, pipeline=2)
    memory = shape_memory(
        config, shape, dtype_bytes=2, block_tokens=64, memory_bytes=80 * 10**9, reserve=Reserve(fixed_bytes=10**9)
    )
    assert memory.reserve_bytes + memory.weights_bytes + memory.free_bytes == 80 * 10**9
    assert memory.weights_bytes == 2 * rank_parameters(config, shape, memory.stage)
    assert memory.kv_bytes_per_token == 2 * 40 * 2 * 128 * 2  # k and v, layers, heads, dim, bytes
    assert memory.blocks == memory.free_bytes // (64 * memory.kv_bytes_per_token)
    assert memory.tokens == 64 * memory.blocks


def test_the_fullest_stage_decides_over_the_blocks_of_all() -> None:
    config = published("llama-3.1-8b")
    shape = ParallelShape(pipeline=3)  # 11, 11 and 10 layers
    options = {"dtype_bytes": 2, "block_tokens": 64, "memory_bytes": 24 * 10**9, "reserve": Reserve()}
    memory = shape_memory(config, shape, **options)  # type: ignore[arg-type]
    assert memory.stage == 0
    assert memory.kv_bytes_per_token == 11 * config.kv_bytes_per_token(2) // 32


def test_kv_heads_that_ranks_have_copies_of_count_on_each() -> None:
    config = published("qwen3-30b-a3b")
    options = {"dtype_bytes": 2, "block_tokens": 64, "memory_bytes": 80 * 10**9, "reserve": Reserve()}
    eight = shape_memory(config, ParallelShape(tensor=8), **options)  # type: ignore[arg-type]
    assert eight.kv_bytes_per_token == config.kv_bytes_per_token(2) // 4
    assert kv_part(ParallelShape(tensor=8), config.dims, 7).heads == 1


def test_a_block_is_as_large_as_the_engine_makes_it() -> None:
    config = published("qwen3-8b")
    library = AutoConfig.for_model(**json.loads((CONFIGS / "qwen3-8b.json").read_text()))
    assert 64 * config.kv_bytes_per_token(2) == kv_shape(library, 64).block_bytes(torch.bfloat16)


def test_the_reserve_is_stated_and_can_be_given() -> None:
    config, shape = published("llama-3.1-8b"), ParallelShape()
    reserve = Reserve()
    steps = reserve.activation_bytes(config, shape, 2)
    assert reserve.of(config, shape, 2, 80 * 10**9) == 2 * 10**9 + 4 * 10**9 + steps
    assert Reserve(fixed_bytes=7).of(config, shape, 2, 80 * 10**9) == 7
    assert reserve.activation_bytes(config, ParallelShape(tensor=2), 2) < steps


# -- which shape


def test_a_model_that_fits_one_gpu_is_served_by_replicas_of_one() -> None:
    chosen = plan("llama-3.1-8b", "8xH200").chosen
    assert chosen is not None
    assert (chosen.shape, chosen.replicas) == (ParallelShape(), 8)


def test_the_smallest_tensor_size_that_holds_the_wanted_contexts_is_taken() -> None:
    long = plan("llama-3.1-70b", "8xH200")
    short = plan("llama-3.1-70b", "8xH200", context_tokens=8192)
    assert long.chosen is not None
    assert short.chosen is not None
    assert (long.chosen.shape.tensor, long.chosen.replicas) == (4, 2)
    assert (short.chosen.shape.tensor, short.chosen.replicas) == (2, 4)
    assert "tensor 2 holds 2 of the 4 contexts of 131,072 tokens wanted" in long.reasons[0]
    assert "one rank does not fit" in short.reasons[0]


def test_stages_come_in_only_where_a_node_is_too_small_and_their_ranks_stay_together() -> None:
    found = plan("llama-3.1-405b", "16xH100")
    assert found.chosen is not None
    assert (found.chosen.shape, found.chosen.nodes, found.chosen.gpus_per_pod) == (ParallelShape(8, 2), 2, 8)
    assert any("tensor 8 does not fit" in reason for reason in found.reasons)
    assert all(one.shape.tensor <= 8 for one in (*found.fitting, *found.too_large))


def test_experts_are_dealt_out_where_they_divide() -> None:
    found = plan("mixtral-8x7b-v0.1", "4xA100-80GB")
    assert found.chosen is not None
    assert found.chosen.shape == ParallelShape(tensor=2, expert=2)
    assert any("4 of 8 experts" in reason for reason in found.reasons)
    odd = dataclasses.replace(published("mixtral-8x7b-v0.1"), experts=7)
    cut = plan_shapes(Question(odd, read_fleet("4xA100-80GB"))).chosen
    assert cut is not None
    assert cut.shape == ParallelShape(tensor=2)


def test_without_room_for_the_wanted_contexts_the_shape_with_most_is_taken_and_said_to_be_short() -> None:
    found = plan("llama-3.1-70b", "4xH100", contexts=50)
    assert found.chosen is not None
    assert found.chosen.contexts_in_all == max(one.contexts_in_all for one in found.fitting)
    assert "no shape holds 50 contexts" in found.reasons[0]


def test_where_nothing_fits_the_closest_is_named_and_what_would_do() -> None:
    found = plan("llama-3.1-405b", "8xH100")
    assert found.chosen is None
    assert not found.fitting
    assert found.reasons[0].startswith("nothing fits: tensor 8 comes closest, and lacks ")
    assert found.reasons[1] == "16 x H100 would do, as tensor 8 x pipeline 2"


def test_gpus_that_are_left_over_are_named() -> None:
    found = plan("llama-3.1-70b", "6xH200", context_tokens=131072)
    assert found.chosen is not None
    assert found.chosen.shape.tensor == 4
    assert "2 GPUs are left over, for another model or pool" in found.reasons


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_shape_is_one_that_the_engine_takes_and_stages_do_not_cross_nodes(name: str) -> None:
    found = plan(name, "24xH200", per_node=8)
    config = published(name)
    for one in (*found.fitting, *found.too_large):
        check_shape(one.shape, config.dims)
        assert one.shape.tensor in tensor_sizes(config.dims)
        assert one.shape.tensor <= 8
        assert one.replicas * one.shape.ranks + one.idle_gpus == 24
        assert one.replicas >= 1
        assert one.memory.fits == (one in found.fitting)


def test_a_shape_in_two_nodes_has_pods_that_are_all_alike() -> None:
    found = plan("llama-3.1-405b", "12xH200", per_node=4)
    three = next(one for one in found.fitting if one.shape == ParallelShape(4, 3))
    assert (three.nodes, three.gpus_per_pod) == (3, 4)
    six = next(one for one in (*found.fitting, *found.too_large) if one.shape == ParallelShape(2, 6))
    assert (six.nodes, six.gpus_per_pod) == (3, 4)


# -- what is read


def test_the_demo_need_not_be_there_to_be_planned_for() -> None:
    assert read_config((demo_model() / "config.json").read_bytes(), "demo") == read_config(DEMO_CONFIG, "demo")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture GPT2LMHeadModel, which no engine here runs"),
        ({"architectures": None}, "the architecture none"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"num_hidden_layers": 0}, "says num_hidden_layers: 0"),
        ({"num_key_value_heads": 3}, "8 query heads for 3 KV heads"),
        ({"vocab_size": "many"}, "is no model's config.json"),
        ({"quantization_config": {"quant_method": "awq"}}, r"is quantised \(awq\)"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_with_what_to_do(change: dict[str, Any], said: str) -> None:
    written = TINY | {"architectures": ["LlamaForCausalLM"]} | change
    with pytest.raises(ConfigRefused, match=f"model .*{said}.*: (use|get) "):
        read_config(json.dumps(written).encode(), "model")


def test_gpus_go_by_the_names_that_people_use() -> None:
    assert read_fleet("8xH200").device is DEVICES["H200"]
    assert read_fleet("8 x h100-80gb").device is DEVICES["H100"]
    assert read_fleet("a100").device is DEVICES["A100-80GB"]
    assert (read_fleet("MI300X").gpus, read_fleet("20xL4").nodes) == (1, 3)
    own = read_fleet("2xSomething", memory_gb=32.5)
    assert (own.device.name, own.device.memory_bytes) == ("Something", 32_500_000_000)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("8xH300", {}, "H300 is not a known GPU: use one of .*H200.*--gpu-memory-gb"),
        ("eight", {}, "eight is not a known GPU"),
        ("8x", {}, "write a number and a name, such as 8xH200"),
        ("0xH200", {}, "at least one"),
        ("8xH200", {"gpus_per_node": -1}, "1 or more"),
        ("8xH200", {"memory_gb": -1}, "more than 0"),
    ],
)
def test_gpus_that_are_none_are_refused(text: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceRefused, match=said):
        read_fleet(text, **options)


@pytest.mark.parametrize(
    "options", [{"context_tokens": 131073}, {"context_tokens": -1}, {"contexts": 0}, {"dtype": "int4"}]
)
def test_questions_without_an_answer_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(QuestionRefused, match=r"^--"):
        plan("llama-3.1-8b", "H200", **options)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_each_gpu_says_where_its_size_is_from(device: Any) -> None:
    size = device.memory_bytes // 10**9
    assert device.source.endswith(f"{size} GB") or f"{8 * size:,} GB" in device.source
