"""The overview of several runs: medians, ranges, and a picture, from reports alone."""

from __future__ import annotations

import json

import pytest
from matplotlib.figure import Figure

from cluster.io.console import ABSENT
from docs.measurements.overview import draw, main, read_runs


def write_report(folder, workload, speeds, *, workloads=(), threads=(1, 1, 1)):
    """A report with a setting for each speed; drafters are d0, d1, ..."""
    entries = [
        {
            "name": f"d{i} k=5" + f" {workload}" * bool(workloads),
            "setting": {"workload": workload if workloads else None},
            "mean_acceptance_length": 2.0 + i,
            "ms_per_draft": 0.25,
            "verify_ms": 3.5 if i else None,
            "tokens_per_s": 100 * speed,
            "plain_tokens_per_s": plain,
            "num_threads": {"target": num_threads},
        }
        for i, (speed, plain, num_threads) in enumerate(zip(speeds, (100, 90, 180), threads, strict=False))
    ]
    job = {"workload": "completion", "prompts": f"data/{workload}.jsonl"}
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps({"job": "bench", "settings": entries, "config": {"job": job}}))
    return str(folder)


@pytest.mark.extended
def test_runs_of_one_workload_are_put_together(tmp_path, capsys):
    runs = [
        write_report(tmp_path / "a", "editing", [1.0, 2.0, 9.0]),
        write_report(tmp_path / "b", "editing", [1.5, 2.2, 3.0], workloads=("editing",)),
        write_report(tmp_path / "c", "human", [0.9]),
    ]
    main([*runs, "--plot", str(tmp_path / "overview.png")])
    assert capsys.readouterr().out.splitlines() == [
        "| drafter | editing | human |",
        "|---|---|---|",
        f"| d0 k=5 | 2.00; 0.25 + {ABSENT} ms; 1.25x (1.00-1.50) | 2.00; 0.25 + {ABSENT} ms; 0.90x |",
        "| d1 k=5 | 3.00; 0.25 + 3.50 ms; 2.10x (2.00-2.20) |  |",
        "| d2 k=5 | 4.00; 0.25 + 3.50 ms; 6.00x (3.00-9.00) |  |",
    ]
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")


def test_plain_decoding_is_compared_among_targets_of_as_many_threads(tmp_path, capsys):
    main([write_report(tmp_path / "a", "editing", [1.0, 1.8, 1.8], threads=(2, 1, 2))])
    speeds = [row.split("; ")[-1].split("x")[0] for row in capsys.readouterr().out.splitlines()[2:]]
    assert speeds == ["0.71", "2.00", "1.29"]  # over 140, the median of 100 and 180, and over 90


def test_a_folder_without_a_bench_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "has no report of job=bench" in capsys.readouterr().err


def test_the_overview_has_a_panel_for_each_figure_and_a_mark_for_each_workload(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.touch() or drawn.append(figure))
    runs = []
    for number, (workload, speed) in enumerate([("editing", 150.0), ("editing", 250.0), ("agent", 300.0)]):
        entries = [
            {
                "name": name,
                "setting": {"workload": None},
                "mean_acceptance_length": 2.0 + i,
                "ms_per_draft": None if i else 0.25 + number,
                "verify_ms": 8.0 + number,
                "tokens_per_s": speed + 50 * i,
                "plain_tokens_per_s": 100.0,
                "num_threads": {"target": 1},
            }
            for i, name in enumerate(("d0", "d1")[: 1 if workload == "agent" else 2])
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        report = {"job": "bench", "settings": entries, "config": {"job": {"prompts": f"{workload}.jsonl"}}}
        (folder / "report.json").write_text(json.dumps(report))
        runs.append(folder)
    draw(read_runs(runs), tmp_path / "overview.png")
    (figure,) = drawn
    shown = [{line.get_label(): line.get_xydata().tolist() for line in axes.lines[:2]} for axes in figure.axes]
    assert shown == [
        {"editing": [[2.0, 0], [3.0, 1]], "agent": [[2.0, 0]]},
        {"editing": [[0.75, 0]], "agent": [[2.25, 0]]},
        {"editing": [[8.5, 0], [8.5, 1]], "agent": [[10.0, 0]]},
        {"editing": [[2.0, 0], [2.5, 1]], "agent": [[3.0, 0]]},
    ]
    names = ["acceptance length", "ms per draft", "ms per pass of the target", "tokens/s over plain decoding"]
    assert [axes.get_xlabel() for axes in figure.axes] == names
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log", "linear", "linear"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["d0", "d1"]
    assert figure.axes[0].yaxis_inverted() and figure.axes[3].lines[-1].get_xdata() == [1.0, 1.0]
    assert figure.get_size_inches().tolist() == pytest.approx([13, 1.4 + 0.3 * 2]) and len(figure.legends) == 1
