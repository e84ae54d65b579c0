"""The scenarios that are explored: small enough to be met whole, scarce enough to hurt."""

import attrs

from swapkv.config import HostFull, RestoreOrder, SwapConfig
from swapkv.layout import KVLayout
from tests.prove.scenario import Action, Scenario


def _dense(layers: int, page_size: int, chunk_tokens: int, **more: object) -> KVLayout:
    return KVLayout.dense(
        num_layers=layers,
        num_kv_heads=1,
        head_dim=1,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        **more,  # type: ignore[arg-type]
    )


ONE_PAGE_CHUNKS = _dense(1, 2, 2)
TWO_PAGE_CHUNKS = _dense(1, 2, 4)
TWO_LAYERS = _dense(2, 2, 2)
ONE_TOKEN_PAGES = _dense(1, 1, 2)
LAYER_BY_LAYER = SwapConfig(segment_bytes=1)
TWO_AT_A_TIME = SwapConfig(segment_bytes=16)
"""Of two-layer chunks: a chunk leaves with one copy, a layer of two chunks comes with one."""


def _registered(*names: str) -> tuple[Action, ...]:
    return tuple(("register", name) for name in names)


def _grown(step: int, name: str) -> tuple[Action, ...]:
    """The sequence takes its next step, the `step`-th of the world."""
    return ("step", name), ("end", step), ("settle",)


def _parked(name: str) -> tuple[Action, ...]:
    return ("preempt", name), ("settle",)


SHORT = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="turns",
            about="3 sequences x 2 chunks x 1 layer on 4 pages",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (2, 3), "b": (2, 3), "c": (2, 3)},
            late=True,
            budget={"preempt": 1},
            begun=(*_registered("a", "b", "c"), *_grown(1, "a"), *_grown(2, "b"), *_grown(3, "c"), *_parked("c")),
        ),
        Scenario(
            name="scarce host",
            about="a host tier that is full: copies are reclaimed, KV is dropped",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=2,
            targets={"a": (2, 3), "b": (2, 3), "c": (3, 4)},
            budget={"preempt": 1},
            begun=(*_registered("a", "b", "c"), *_grown(1, "a"), *_grown(2, "b"), *_grown(3, "c"), *_parked("c")),
        ),
        Scenario(
            name="faults",
            about="2 sequences x 2 chunks x 2 layers, a fault and a cancel",
            layout=TWO_LAYERS,
            pages=(3,),
            host_chunks=8,
            config=TWO_AT_A_TIME,
            targets={"a": (3, 4), "b": (3, 4)},
            in_order=True,
            budget={"preempt": 1, "fault": 1, "cancel": 1},
            begun=(*_registered("a", "b"), *_grown(1, "b"), *_parked("b"), *_grown(2, "a")),
        ),
        Scenario(
            name="fork",
            about="a fork of shared chunks with copies",
            layout=TWO_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (3, 4), "x": (3, 4)},
            children=("x",),
            budget={"preempt": 2, "fork": 1},
            begun=(*_registered("a"), *_grown(1, "a"), *_parked("a"), ("restore", "a"), ("settle",)),
        ),
        Scenario(
            name="fork without a copy",
            about="a fork of shared chunks without copies, a fault and a cancel",
            layout=TWO_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (3, 4), "x": (3, 4)},
            children=("x",),
            budget={"preempt": 2, "cancel": 1, "fault": 1},
            begun=(*_registered("a"), *_grown(1, "a"), ("fork", "a", "x")),
        ),
        Scenario(
            name="branches",
            about="a fork whose branches part, and a cancel",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (3, 4), "x": (3, 4)},
            children=("x",),
            late=True,
            budget={"preempt": 2, "cancel": 1},
            begun=(
                *_registered("a"),
                *_grown(1, "a"),
                *_parked("a"),
                ("restore", "a"),
                ("settle",),
                ("fork", "a", "x"),
                *_grown(2, "a"),
            ),
        ),
        Scenario(
            name="reclaim",
            about="a host tier that is full, and a cancel",
            layout=ONE_PAGE_CHUNKS,
            pages=(3,),
            host_chunks=2,
            config=LAYER_BY_LAYER,
            targets={"a": (3, 4), "b": (1, 2)},
            budget={"preempt": 1, "cancel": 1},
            begun=(*_registered("a", "b"), *_grown(1, "a"), *_parked("a"), *_grown(2, "b")),
        ),
        Scenario(
            name="layer by layer",
            about="a chunk that leaves in two copies, and a fault",
            layout=TWO_LAYERS,
            pages=(2,),
            host_chunks=8,
            config=LAYER_BY_LAYER,
            targets={"a": (3, 4)},
            late=True,
            budget={"preempt": 2, "fault": 1, "cancel": 1},
            begun=(*_registered("a"), *_grown(1, "a")),
        ),
        *(
            Scenario(
                name=f"ranks, {', '.join(budget)}",
                about=f"two ranks that end in any order, one {' or '.join(budget)}",
                layout=ONE_PAGE_CHUNKS,
                pages=(3,),
                host_chunks=8,
                targets={"a": (2, 3), "b": (2, 3)},
                ranks=2,
                in_order=True,
                budget=dict.fromkeys(("preempt", *budget), 1),
                begun=(*_registered("a", "b"), *_grown(1, "b"), *_parked("b"), *_grown(2, "a")),
            )
            for budget in (("cancel", "fault"), ("die",), ("hang",))
        ),
        Scenario(
            name="hang",
            about="a copy that hangs, and a cancel",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (2, 3), "b": (2, 3)},
            budget={"preempt": 1, "hang": 1, "cancel": 1},
            begun=(*_registered("a", "b"), *_grown(1, "a"), *_grown(2, "b"), *_parked("b")),
        ),
        Scenario(
            name="hang of several",
            about="a copy of several chunks, a begun one among them, that hangs",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=8,
            targets={"a": (3, 4), "b": (1, 2)},
            budget={"preempt": 1, "hang": 1, "cancel": 1},
            begun=(*_registered("a", "b"), *_grown(1, "a"), *_grown(2, "b")),
        ),
        *(
            Scenario(
                name=f"gate {what}",
                about=f"a forward on an open gate, {end}",
                layout=TWO_LAYERS,
                pages=(4,),
                host_chunks=8,
                config=LAYER_BY_LAYER,
                targets={"a": (2, 3), "b": (2, 3)},
                gates=True,
                in_order=True,
                budget={what: 1},
                begun=(*_registered("a", "b"), *_grown(1, "a"), *_grown(2, "b"), *_parked("b")),
            )
            for what, end in (
                ("void", "which is given up"),
                ("cancel", "whose restore is cancelled"),
                ("fault", "whose restore fails"),
            )
        ),
        Scenario(
            name="gate queue",
            about="three restores by layers on two pages, forwards on open gates",
            layout=TWO_LAYERS,
            pages=(2,),
            host_chunks=8,
            config=SwapConfig(segment_bytes=1, inflight_bytes_per_sequence=1),
            targets={"a": (1, 2), "b": (1, 2), "c": (1, 2)},
            gates=True,
            in_order=True,
            begun=(
                *_registered("a", "b", "c"),
                *_grown(1, "b"),
                *_parked("b"),
                *_grown(2, "c"),
                *_parked("c"),
                *_grown(3, "a"),
            ),
        ),
        Scenario(
            name="family",
            about="forks restored together on too few pages, a fault and a cancel",
            layout=TWO_LAYERS,
            pages=(3,),
            host_chunks=8,
            config=SwapConfig(segment_bytes=1, ops_per_lane=2),
            targets={"a": (3, 4), "x": (3, 4), "c": (3,)},
            children=("x",),
            in_order=True,
            budget={"cancel": 1, "fault": 1},
            begun=(
                *_registered("a", "c"),
                *_grown(1, "a"),
                ("fork", "a", "x"),
                *_parked("a"),
                *_parked("x"),
                *_grown(2, "c"),
            ),
        ),
        Scenario(
            name="family on gates",
            about="forwards on open gates of forks whose restores are cancelled",
            layout=TWO_LAYERS,
            pages=(3,),
            host_chunks=8,
            config=SwapConfig(segment_bytes=1, ops_per_lane=2),
            targets={"a": (3, 4), "x": (3, 4)},
            children=("x",),
            gates=True,
            in_order=True,
            budget={"cancel": 1},
            begun=(*_registered("a"), *_grown(1, "a"), ("fork", "a", "x"), *_parked("a"), *_parked("x")),
        ),
        Scenario(
            name="delta",
            about="preempts that move what is new, a fault, a cancel, a truncate",
            layout=TWO_PAGE_CHUNKS,
            pages=(3,),
            host_chunks=8,
            targets={"a": (3, 4)},
            late=True,
            budget={"preempt": 2, "fault": 1, "truncate": 1, "cancel": 1},
            begun=(*_registered("a"), *_grown(1, "a")),
        ),
        Scenario(
            name="window",
            about="a sliding window, two preempts and a truncate",
            layout=_dense(1, 1, 2, windows=[2], truncate_slack=1),
            pages=(6,),
            host_chunks=8,
            targets={"a": (2, 4, 5, 6)},
            budget={"preempt": 2, "truncate": 1},
            begun=(*_registered("a"), *_grown(1, "a")),
        ),
        Scenario(
            name="queue",
            about="partial restores that give their pages back",
            layout=ONE_TOKEN_PAGES,
            pages=(4,),
            host_chunks=8,
            config=SwapConfig(segment_bytes=1),
            targets={"a": (3, 4), "b": (3, 4), "c": (1, 2, 3)},
            priorities={"a": 1},
            budget={"preempt": 1},
            begun=(
                *_registered("a", "b", "c"),
                *_grown(1, "a"),
                *_parked("a"),
                *_grown(2, "b"),
                *_parked("b"),
                *_grown(3, "c"),
            ),
        ),
        Scenario(
            name="links",
            about="links with a rate: tokens, wake-ups, faults",
            layout=ONE_PAGE_CHUNKS,
            pages=(3,),
            host_chunks=8,
            config=SwapConfig(
                segment_bytes=1,
                restore_bytes_per_s=1000,
                restore_burst_bytes=8,
                offload_bytes_per_s=1000,
                offload_burst_bytes=8,
            ),
            targets={"a": (3, 4), "b": (1, 2)},
            budget={"preempt": 1, "fault": 1, "cancel": 1},
            begun=(*_registered("a", "b"), *_grown(1, "a"), *_grown(2, "b")),
        ),
        Scenario(
            name="abort",
            about="ends at any time, wishes in the wrong moment, repeated reports",
            layout=ONE_PAGE_CHUNKS,
            pages=(3,),
            host_chunks=8,
            config=LAYER_BY_LAYER,
            targets={"a": (3, 4), "b": (2, 3)},
            budget={"preempt": 1, "abort": 1, "cancel": 1},
            repeats=True,
            rude=True,
            begun=(*_registered("a", "b"), *_grown(1, "b"), *_grown(2, "a")),
        ),
        Scenario(
            name="refusals",
            about="a host tier that refuses, two sequences in a forward",
            layout=ONE_PAGE_CHUNKS,
            pages=(4,),
            host_chunks=2,
            config=SwapConfig(host_full=HostFull.REFUSE),
            targets={"a": (2, 3), "b": (2, 3), "c": (3, 4)},
            batch=2,
            budget={"preempt": 1},
            begun=(*_registered("a", "b", "c"), *_grown(1, "a"), *_grown(2, "b"), *_grown(3, "c"), *_parked("c")),
        ),
        Scenario(
            name="chunk major",
            about="restores chunk by chunk, a cancel and an eviction",
            layout=ONE_PAGE_CHUNKS,
            pages=(3,),
            host_chunks=8,
            config=SwapConfig(restore_order=RestoreOrder.CHUNK_MAJOR),
            targets={"a": (3, 4), "b": (3, 4)},
            budget={"preempt": 1, "cancel": 1, "evict": 1},
            begun=(*_registered("a", "b"), *_grown(1, "b"), *_parked("b"), *_grown(2, "a")),
        ),
    )
}


def _longer(name: str, base: str, **changes: object) -> Scenario:
    """A scenario with more in it; `budget` is added to the budget of its base."""
    scenario = SHORT[base]
    budget = changes.pop("budget", {})
    assert isinstance(budget, dict)
    return attrs.evolve(scenario, name=name, budget={**scenario.budget, **budget}, **changes)


LONG = {
    scenario.name: scenario
    for scenario in (
        _longer("three from the start", "turns", begun=_registered("a", "b", "c"), late=False, budget={"preempt": 1}),
        _longer("turns, two preempts", "turns", late=False, budget={"preempt": 2, "cancel": 1}),
        _longer("faults, any order", "faults", in_order=False, config=LAYER_BY_LAYER, budget={"preempt": 1}),
        _longer("faults, two preempts", "faults", budget={"preempt": 2}),
        _longer("gate queue, priorities", "gate queue", priorities={"c": 1}),
        _longer("gate fault, preempt", "gate fault", budget={"preempt": 1, "fault": 1}),
        _longer("gate cancel, preempt", "gate cancel", budget={"preempt": 1, "cancel": 1}),
        _longer("hang, two preempts", "hang", budget={"preempt": 2}),
        _longer("scarce host, two preempts", "scarce host", budget={"preempt": 2}),
        _longer("queue, cancel", "queue", budget={"cancel": 1}),
    )
}

WORLDS = {**SHORT, **LONG}
