"""The configs whose steps are measured: techniques and layouts at the shapes of real models."""

from dataclasses import dataclass

COMPILE = ("--compile.enable=true",)
FLOAT8 = (*COMPILE, "--quantize.linear.float8.enable=true")
BATCH_2 = ("--training.global_batch_size=16", "--training.local_batch_size=2")
FULL, NONE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=none"
ON_HOST = "--activation_checkpoint.offload=true"
EXPERT = "--parallelism.expert_parallel_degree="
CONTEXT = "--parallelism.context_parallel_degree="
ULYSSES = "--parallelism.context_parallel_method=ulysses"
TENSOR = "--parallelism.tensor_parallel_degree="
REPLICATE = "--parallelism.data_parallel_replicate_degree="
PIPELINE, SCHEDULE = "--parallelism.pipeline_parallel_degree=", "--parallelism.pipeline_parallel_schedule="
PIPELINE_2 = PIPELINE + "2", "--training.global_batch_size=16", "--training.local_batch_size=1"
PIPELINE_8 = PIPELINE + "8", TENSOR + "4", "--training.global_batch_size=32", "--training.local_batch_size=1"
PIPELINE_16 = PIPELINE + "16", TENSOR + "8", "--training.global_batch_size=32", "--training.local_batch_size=1"


@dataclass(frozen=True)
class Variant:
    """A rank of `world_size` ranks. The local batch size is 1 by default."""

    name: str
    options: tuple[str, ...] = ()
    config: str = "llama3_8b"
    world_size: int = 8
    rank: int = 0
    device: str = "H100"
    """Device of the plan. The stand-in has its memory."""
    waits: int = 0
    """Times that the host waits for the device in a step: for gradients that it updates, or for counts of tokens."""

    @property
    def words(self) -> list[str]:
        """Arguments of measure.py."""
        batch = () if any("global_batch" in option for option in self.options) else (
            f"--training.global_batch_size={self.world_size}",
        )  # fmt: skip
        run = [f"--world={self.world_size}", f"--rank={self.rank}", f"--device={self.device}", f"--name={self.name}"]
        return [self.config, *run, *batch, *self.options]

    @property
    def is_compiled(self) -> bool:
        return COMPILE[0] in self.options


VARIANTS = [
    Variant("8B, batch 1"),
    Variant("8B, batch 2", BATCH_2),
    Variant("8B, batch 1, compiled", COMPILE),
    Variant("8B, batch 2, compiled", (*BATCH_2, *COMPILE)),
    Variant("full AC", (FULL,)),
    Variant("full AC, compiled", (FULL, *COMPILE)),
    Variant("no AC, seq 4096", (NONE, "--training.seq_len=4096")),
    Variant("no AC, seq 4096, activations on the host", (NONE, ON_HOST, "--training.seq_len=4096")),
    Variant("full AC, activations on the host, compiled", (FULL, ON_HOST, *COMPILE)),
    Variant("no AC, seq 4096, compiled", (NONE, "--training.seq_len=4096", *COMPILE)),
    Variant("accumulation 2", ("--training.global_batch_size=16",)),
    Variant(
        "reproducible layouts, accumulation 2",
        ("--training.global_batch_size=16", "--training.local_batch_size=1", "--debug.reproducible_layouts=true"),
    ),
    Variant("HSDP 2 x 4", (REPLICATE + "2",)),
    Variant("HSDP 2 x 4, accumulation 2", ("--training.global_batch_size=16", REPLICATE + "2")),
    Variant("HSDP 2 x 4, rounds of workers", (REPLICATE + "2", "--outer.every=1", "--outer.over_replicas"), waits=1),
    Variant("replicas 8 x 1, 1B", (REPLICATE + "8",), config="llama3_1b"),
    Variant("never resharded", ("--parallelism.fsdp_reshard_after_forward=never",)),
    Variant("CPU offload, 64 GPUs", ("--training.enable_cpu_offload=true",), world_size=64, waits=297),
    Variant("update in backward", ("--optimizer.in_backward=true", "--training.max_norm=0")),
    Variant("bfloat16 moments", ("--optimizer.state_dtype=bfloat16",)),
    Variant("bfloat16 weights and moments", ("--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16")),
    Variant("Muon", ("--optimizer.name=Muon",)),
    Variant("z-loss", ("--training.z_loss=1e-4",)),
    Variant("document mask", ("--data.document_mask=true",)),
    Variant("float32, seq 2048", ("--training.mixed_precision_param=float32", "--training.seq_len=2048")),
    Variant("Qwen3 8B", config="qwen3_8b"),
    Variant("Qwen3 30B-A3B, 16 GPUs", config="qwen3_30b_a3b", world_size=16),
    Variant("OLMo 3 7B, windows", config="olmo3_7b"),
    Variant("OLMo 3 7B, windows, documents, compiled", ("--data.document_mask=true", *COMPILE), config="olmo3_7b"),
    Variant(
        "Gemma 3 27B, 32 GPUs",
        ("--model.flavor=27B", "--model.args.vocab_size=262208"),
        config="gemma3_1b",
        world_size=32,
    ),
    Variant("gpt-oss 20B, 16 GPUs", config="gpt_oss_20b", world_size=16),
    Variant("gpt-oss 20B, 16 GPUs, context 2", (CONTEXT + "2", "--training.global_batch_size=8"), "gpt_oss_20b", 16),
    Variant("Qwen3-Next 80B, 32 GPUs", config="qwen3_next_80b_a3b", world_size=32),
    Variant(
        "Qwen3-Next 80B, 32 GPUs, context 2, tensor 2",
        (CONTEXT + "2", TENSOR + "2", "--training.global_batch_size=8"),
        "qwen3_next_80b_a3b",
        32,
    ),
    Variant("Moonlight 16B, 16 GPUs", config="moonlight_16b_a3b", world_size=16),
    Variant("context 2, 16,384 tokens", (CONTEXT + "2", "--training.seq_len=16384", "--training.global_batch_size=4")),
    Variant(
        "context 2, documents, compiled",
        (CONTEXT + "2", "--data.document_mask=true", "--training.global_batch_size=4", *COMPILE),
    ),
    Variant(
        "context 64, 1,048,576 tokens, full AC",
        (CONTEXT + "64", "--training.seq_len=1048576", "--training.global_batch_size=1", FULL),
        world_size=64,
    ),
    Variant(
        "context 2, 16,384 tokens, heads for tokens",
        (CONTEXT + "2", ULYSSES, "--training.seq_len=16384", "--training.global_batch_size=4"),
    ),
    Variant(
        "70B, 64 GPUs, context 2",
        (CONTEXT + "2", "--training.global_batch_size=128"),
        config="llama3_70b",
        world_size=64,
    ),
    Variant("tensor 2", (TENSOR + "2", "--training.global_batch_size=4")),
    Variant("tensor 2, compiled", (TENSOR + "2", "--training.global_batch_size=4", *COMPILE)),
    Variant(
        "70B, 64 GPUs, tensor 8", (TENSOR + "8", "--training.global_batch_size=8"), config="llama3_70b", world_size=64
    ),
    Variant("context 2, tensor 2", (CONTEXT + "2", TENSOR + "2", "--training.global_batch_size=2")),
    Variant("30B-A3B, 16 GPUs, expert 8", (EXPERT + "8",), config="qwen3_30b_a3b", world_size=16, waits=96),
    Variant(
        "30B-A3B, 16 GPUs, expert 8, compiled",
        (EXPERT + "8", *COMPILE),
        config="qwen3_30b_a3b",
        world_size=16,
        waits=96,
    ),
    Variant(
        "30B-A3B, 16 GPUs, context 2, expert 8",
        (CONTEXT + "2", EXPERT + "8", "--training.global_batch_size=8"),
        config="qwen3_30b_a3b",
        world_size=16,
        waits=96,
    ),
    Variant(
        "30B-A3B, 16 GPUs, expert 4, tensor 2",
        (EXPERT + "4", TENSOR + "2", "--training.global_batch_size=8"),
        config="qwen3_30b_a3b",
        world_size=16,
        waits=96,
    ),
    Variant("pipeline 2, first stage", PIPELINE_2),
    Variant("pipeline 2, last stage", PIPELINE_2, rank=4),
    Variant("pipeline 2, interleaved, compiled", (*PIPELINE_2, SCHEDULE + "Interleaved1F1B", *COMPILE)),
    *(
        Variant(f"70B, 64 GPUs, pipeline 8, tensor 4, rank {rank}", PIPELINE_8, "llama3_70b", 64, rank)
        for rank in (0, 8, 56)
    ),
    *(
        Variant(f"405B, 128 GPUs, pipeline 16, tensor 8, rank {rank}", PIPELINE_16, "llama3_405b", 128, rank)
        for rank in (0, 8, 120)
    ),
    Variant("float8 tensorwise, batch 2, compiled", (*BATCH_2, *FLOAT8)),
    Variant("float8 tensorwise, tensor 2, compiled", (TENSOR + "2", "--training.global_batch_size=4", *FLOAT8)),
    Variant("float8 rowwise, batch 2, compiled", (*BATCH_2, *FLOAT8, "--quantize.linear.float8.recipe_name=rowwise")),
    Variant("70B, 64 GPUs", config="llama3_70b", world_size=64),
    Variant("70B, 64 GPUs, compiled", COMPILE, config="llama3_70b", world_size=64),
    Variant("405B, 512 H200", config="llama3_405b", world_size=512, device="H200"),
    Variant("405B, 512 H200, compiled", COMPILE, config="llama3_405b", world_size=512, device="H200"),
]
