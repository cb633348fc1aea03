"""An engine that behaves as the environment says; answers in the words of `cbgen.bench.peers.protocol`."""

import json
import os
import sys
import time


def main():
    task = json.loads(sys.stdin.readline())
    behaviour = task["knobs"].get("behaviour", os.environ.get("FAKE_PEER", "good"))
    if behaviour == "crash":
        raise RuntimeError("the engine broke")
    if behaviour == "silent":
        return
    if behaviour == "no json":
        sys.stdout.write("INFO loading\n")
        return
    if behaviour == "missing":
        sys.stdout.write(json.dumps({"event": "error", "kind": "missing", "message": "No module named 'fake'"}) + "\n")
        return
    sys.stdout.write(json.dumps({"event": "ready", "load_seconds": 0.25}) + "\n")
    sys.stdout.flush()
    if behaviour == "hang":
        child = os.fork()
        if child:
            with open(task["model"], "w") as file:
                file.write(f"{os.getpid()} {child}")
        time.sleep(600)
    counts = list(task["lengths"])
    if behaviour == "wrong count":
        counts[-1] += 1
    if behaviour == "fewer rows":
        counts.pop()
    speed = task["knobs"].get("batch_size", 10)
    sys.stdout.write(
        json.dumps(
            {
                "event": "result",
                "wall_seconds": sum(counts) / speed,
                "counts": counts,
                "checksums": counts,
                "peak_bytes": 5_000_000,
                "versions": {"fake": "1.0"},
                "facts": task["knobs"].get("facts", {}),
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
