"""Stands in for the engine's server in tests of ``plan``: its batches and two GPUs of 100 GB, none of the model.

Of each GPU 99 GB are free before loading and 30 GB are weights. A forward keeps a MB for each of its tokens, on the
second GPU half a MB more, and 2 MB for each token with log-probabilities. It rehearses a chunk, and is sized by what is
recorded. ``STANDIN`` is a comma-separated list of what goes wrong.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from sglang_moe_patches.core.variables import PLAN
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.memory.kv_sizing import decide, record, size

from sglang.srt.server_args import prepare_server_args

MB, GB = 10**6, 10**9
WRONG = os.environ.get("STANDIN", "").split(",")
ARGS = prepare_server_args(sys.argv[1:])
RULE, RECORDS = ARGS.mem_fraction_static, decide.record_path(os.environ)
START = size.Start(99 * GB, 100 * GB, RULE)
KNOWN = record.read(RECORDS).get("here") if decide.KV_SIZING.read() else None
DECISION = size.decide(START, KNOWN)
ARGS.mem_fraction_static = DECISION.fraction or RULE
CHUNK, REQUESTS, CAPTURED, CONTEXT, TOKEN_BYTES = ARGS.chunked_prefill_size, 40, 16, 20_000, MB
CACHE = round((69 * GB - 99 * GB * (1 - ARGS.mem_fraction_static)) / TOKEN_BYTES)
LOCK = Lock()
CACHED: list = []
"""Prompts that were answered: what begins as one of them goes on behind it."""


class Gpu:
    def __init__(self, number):
        self.number, self.used, self.kept, self.retries = number, 100 * GB - 99 * GB, 0, 0
        self.place = events.Place(gpu=number, tp=number)
        self.file = (Path(os.environ[PLAN.name]) / f"{number}.jsonl").open("a", buffering=1)
        kv = ("not needed here", "of --enable-eplb") if "not needed" in WRONG else ("applied", "")
        self.write(
            events.Start((events.ChangeStatus("output-buffer", "applied", ""), events.ChangeStatus("kv-sizing", *kv)))
        )
        self.write(events.Stage("load_model", False, self.place, self.memory()))
        self.used += 30 * GB
        self.write(events.Stage("load_model", True, self.place, self.memory()))
        self.write(events.Sized(99 * GB, CACHE * TOKEN_BYTES, self.memory()))
        self.used += CACHE * TOKEN_BYTES
        facts = events.ServerFacts(
            kv_bytes=CACHE * TOKEN_BYTES,
            kv_tokens=CACHE,
            page=1,
            table_bytes=8,
            table_requests=40,
            context=CONTEXT,
            vocabulary=5000,
        )
        self.write(events.Ready(self.place, facts, self.memory()))

    def write(self, event):
        self.file.write(events.to_json(event) + "\n")

    def memory(self):
        held = self.used + self.kept
        free = 100 * GB - held
        if free < 0:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", -free, flush=True)
            os._exit(1)
        known = {"allocated": self.used, "peak": held, "reserved": held, "free": free, "total": 100 * GB}
        return events.Device(**known, retries=self.retries)

    def forward(self, mode, tokens, requests, prefix=0, logprobs=0, graph=False):
        before = self.memory()
        each = MB if self.number == 0 else 1.5 * MB
        self.kept = max(self.kept, round(tokens * each + logprobs * 2 * MB))
        self.retries += "retries" in WRONG and requests == 1 and tokens == 77
        batch = events.Batch(mode, tokens, requests, prefix, prefix // requests, logprobs=logprobs)
        self.write(events.Forward(self.place, batch, graph, before, self.memory()))


def serve(gpus, asked):
    if "--log-level error" not in WRONG:
        print("Decode batch, token usage: 0.99", "KV cache pool is full. Retract requests.", flush=True)
    prompts, logprobs = asked["input_ids"], asked.get("return_logprob", False)
    new = asked["sampling_params"]["max_new_tokens"]
    for gpu in gpus:
        if len(prompts) == 9 and len(prompts[0]) % CHUNK == 0:  # one that others wait behind, and share a prefix
            gpu.forward("EXTEND", CHUNK, 1)
            part = (CHUNK - 1) // 8
            gpu.forward("EXTEND", 8 * part, 8, prefix=8 * (len(prompts[1]) - part))
        elif len(prompts) == 1:
            behind = max((len(one) for one in CACHED if prompts[0][: len(one)] == one != prompts[0]), default=0)
            for start in range(behind, len(prompts[0]), CHUNK):
                tokens = min(CHUNK, len(prompts[0]) - start)
                gpu.forward("EXTEND", tokens, 1, prefix=start, logprobs=tokens if logprobs else 0)
        else:
            gpu.forward("EXTEND", min(CHUNK, sum(map(len, prompts))), len(prompts))
        if new > 1:
            running = min(len(prompts), REQUESTS)
            gpu.forward("DECODE", running, running, graph=running <= CAPTURED)
    CACHED.extend(prompts[:1])


def rehearse(gpus):
    """Records what a chunk needs."""
    for gpu in gpus:
        gpu.forward("EXTEND", CHUNK, 1)
    free = min(gpu.memory().free for gpu in gpus)
    found = record.Record(
        made_of={"engine": "a stand-in"},
        total=START.total,
        before=START.before,
        rule_fraction=RULE,
        fraction=ARGS.mem_fraction_static,
        tokens=CACHE,
        kv_bytes=CACHE * TOKEN_BYTES,
        need=round(START.before * (1 - ARGS.mem_fraction_static)) - free,
        driven=("prefill chunk",),
        proven=KNOWN is not None,
    )
    record.change(RECORDS, "here", lambda old: record.rehearsed(old, found, 0))


class Server(ThreadingHTTPServer):
    request_queue_size = 256


class Handler(BaseHTTPRequestHandler):
    gpus: tuple = ()

    def do_GET(self):
        graphs = {
            "cuda_graph_max_bs": CAPTURED,
            "internal_states": [{"effective_max_running_requests_per_dp": REQUESTS}],
        }
        limits = {"max_req_input_len": CONTEXT - 6, "max_total_num_tokens": CACHE, "dp_size": 1}
        self.answer({**vars(ARGS), **graphs, **limits} if "info" in self.path else {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if any(len(prompt) >= CONTEXT - 6 for prompt in asked.get("input_ids", ())):
            return self.answer({"error": "longer than the model's context"}, 400)
        if self.path == "/generate" and asked.get("return_logprob") and "no logprobs" in WRONG:
            return self.answer({"error": "no log-probabilities here"}, 400)
        if self.path == "/generate":
            with LOCK:
                serve(self.gpus, asked)
            time.sleep(0.01)
        self.answer({})

    def answer(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main():
    if "cannot start" in WRONG:
        sys.exit("no such model")
    taken = Path(os.environ["STANDIN_FOLDER"]) / "taken"
    if "port taken" in WRONG and not taken.exists():
        taken.touch()
        sys.exit("DistNetworkError: port: 34479, code: -98, name: EADDRINUSE, message: address already in use")
    if "large weights" in WRONG and ARGS.mem_fraction_static < (0.88 if "larger weights" not in WRONG else 2):
        sys.exit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    if "cannot start twice" in WRONG and KNOWN is not None:
        sys.exit("something else")
    if "too large" in WRONG and KNOWN is not None:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    Handler.gpus = (Gpu(0), Gpu(1))
    if DECISION.rehearse and "not needed" not in WRONG:
        if "nothing is recorded" in WRONG:
            print("sglang-moe-patches: kv-sizing: the engine's rule, 0.8: images are not rehearsed yet", flush=True)
        else:
            rehearse(Handler.gpus)
    (Path(os.environ["STANDIN_FOLDER"]) / "started").touch()
    if os.fork() == 0:  # a worker
        time.sleep(3600)
    Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
