"""Files of fleets are read or refused with one line, and devices are divided as they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from msgspec import structs, to_builtins

from cluster.tools.fleet.description import Fleet, Links, Merging, Region, read_fleet
from cluster.tools.fleet.layouts import Drafting, layouts
from tests.cluster.tools.fleet.fleets import small_fleet, two_regions

PLANS = Path(__file__).parents[4] / "docs" / "plans"


def written(path: Path, fleet: Fleet, **changes) -> Path:
    content = to_builtins(fleet)
    for keys, value in changes.items():
        place, *rest = keys.split("__")
        if rest:
            content[place][rest[0]] = value
        else:
            content[place] = value
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_file_says_what_the_record_says(tmp_path):
    fleet = two_regions()
    assert read_fleet(written(tmp_path / "fleet.yaml", fleet)) == fleet
    shipped = read_fleet(PLANS / "three-regions.yaml")
    assert sum(region.devices for region in shipped.regions) == 64
    assert shipped.losses.drafters_per_minute == 0.3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target__ranks": 10}, "target.ranks: no region has 10 devices"),
        ({"target__rank": 1}, "rank"),
        ({"links__between": {"east-north": 3}}, "links.between.east-north"),
        ({"load__shares": {"north": 1.0}}, "load.shares: there is no region 'north'"),
        ({"load__shares": {"east": 0.0}}, "load.shares: are all 0"),
        ({"load__warmup_s": 4.0}, "load.warmup_s"),
        ({"load__lengths": "none.csv"}, "none.csv: cannot be read"),
        ({"load__requests_per_s": 0}, "requests_per_s"),
        ({"target__kv_slots": 50}, "target.kv_slots: a request of 80 tokens"),
        ({"regions": []}, "regions"),
        ({"acceptance": 1.2}, "acceptance"),
        ({"acceptance": []}, "acceptance"),
        ({"pipeline": "pingpong"}, "pipeline"),
        ({"losses__outages": [{"region": "north", "at_s": 1}]}, "losses.outages"),
    ],
)
def test_what_makes_no_sense_is_one_line(tmp_path, changes, named):
    path = written(tmp_path / "fleet.yaml", two_regions(), **changes)
    with pytest.raises(ValueError, match=r"^job\.fleet=") as error:
        read_fleet(path)
    assert named in str(error.value) and "\n" not in str(error.value) and "docs/fleet.md" in str(error.value)


@pytest.mark.parametrize(
    "text", ["prompt_tokens\n3\n", "prompt_tokens,output_tokens\n3,x\n", "prompt_tokens,output_tokens\n"]
)
def test_lengths_that_make_no_sense_are_one_line(tmp_path, text):
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.csv: needs"):
        read_fleet(written(tmp_path / "fleet.yaml", two_regions(), load__lengths="lengths.csv"))


@pytest.mark.parametrize("devices", [(4,), (5,), (9, 9), (22, 21, 21), (40, 3, 17)])
@pytest.mark.parametrize("share", [1, 2, 4, 16])
def test_layouts_fit_their_regions(devices, share):
    regions = [Region(name=f"r{i}", devices=count, price=1.0) for i, count in enumerate(devices)]
    fleet = small_fleet(regions=regions)
    found = list(layouts(fleet, [share]))
    assert [one.drafting for one in found[:2]] == [Drafting.plain, Drafting.attached]
    for layout in found:
        for count, targets, pools in zip(devices, layout.num_targets, layout.num_pools, strict=True):
            assert 4 * targets + pools <= count
        if layout.drafting is Drafting.pools and layout.targets_per_pool == 1 and len(devices) == 1:
            assert layout.num_targets == layout.num_pools, "each has its own"
    assert len({(one.drafting, one.num_targets, one.num_pools) for one in found}) == len(found)


def test_rules_of_merging_are_layouts_of_pools_that_are_shared():
    fleet = small_fleet(8)
    drafter = structs.replace(fleet.drafter, merging=[Merging.calls, Merging.passes])
    found = [one for one in layouts(structs.replace(fleet, drafter=drafter), [4]) if one.drafting is Drafting.pools]
    assert [(one.name, one.merging) for one in found] == [
        ("a drafter each", Merging.passes),
        ("pools of 4, calls merged", Merging.calls),
        ("pools of 4, passes merged", Merging.passes),
    ]


def test_pools_of_all_regions_are_where_the_others_are_nearest():
    regions = [Region(name=name, devices=20, price=1.0) for name in ("east", "middle", "west")]
    links = Links(between={"east-middle": 5, "middle-west": 5, "east-west": 9})
    central = [one for one in layouts(small_fleet(regions=regions, links=links), [4]) if " in " in one.name]
    assert [one.name for one in central] == ["pools of 4 in middle"]
    assert central[0].num_pools[0] == central[0].num_pools[2] == 0 < central[0].num_pools[1]
    assert central[0].num_targets[1] < central[0].num_targets[0]
