"""`job=datastore`: text files as a datastore for `drafter=rest`, in the target's tokens.

Reads text and writes one file; starts no engine.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from actors.drafters.corpus import read_corpus
from actors.drafters.retrieval.datastore import write_datastore
from actors.tokenizer_file import tokenizer_digest
from cluster.config.schema import LaunchConfig
from cluster.io.console import Terminal
from cluster.io.text import named_files
from cluster.observability.report import write_json
from parallel.whole_files import make_folder


def run(config: LaunchConfig, run_dir: Path) -> None:
    """Raises ValueError for patterns without files, and for files that are no text."""
    terminal, job, target = Terminal(), config.job, Path(config.target.path)
    out = Path(job.out).expanduser() if job.out else run_dir / "datastore"
    files = named_files(job.files)
    make_folder(out.parent)
    with terminal.starting() as progress:
        documents = []
        for file in files:
            progress(f"reading {file.name}")
            documents += read_corpus(file, target, "job.files")
        progress("sorting")
        num_tokens = write_datastore(out, documents, tokenizer_digest(target))
    about = {"files": len(files), "documents": len(documents), "tokens": num_tokens, "bytes": out.stat().st_size}
    write_json(run_dir / "datastore.json", {"job": job.name, "datastore": str(out), **about, "config": asdict(config)})
    terminal.line(f"{num_tokens:,} tokens of {len(files)} files written to {out}: drafter=rest drafter.datastore={out}")
