"""The pure part of the package works on a Python that has no torch at all."""

import subprocess
import sys

PURE = (
    "cbgen.cli, cbgen.pipeline, cbgen.config, cbgen.params, cbgen.records, cbgen.errors, cbgen.signals, "
    "cbgen.engine.sequence, cbgen.engine.block_manager, cbgen.engine.scheduler, cbgen.engine.model_input, "
    "cbgen.engine.prediction, cbgen.engine.prefix_cache, cbgen.engine.waiting, "
    "cbgen.engine.model_files, cbgen.engine.sampling_input, "
    "cbgen.data.readers, cbgen.data.prompts, cbgen.output.writers, cbgen.data.feed, "
    "cbgen.report.metrics, cbgen.report.progress, cbgen.bench.simulate, "
    "cbgen.bench.compare, cbgen.bench.report"
)


def test_pure_modules_import_without_torch():
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
    subprocess.run([sys.executable, "-c", f"{blocked}import {PURE}"], check=True)


def test_simulate_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from cbgen.cli import main; "
        "main(['simulate', '--lengths', '100,20,50,200,30'])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "10.0 s (200 steps)" in result.stdout
