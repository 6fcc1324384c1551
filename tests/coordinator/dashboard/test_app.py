"""The app under Textual's pilot: real layout, no terminal, no clock but the one given."""

import asyncio
import html
import re
from dataclasses import replace

import pytest

from atoll.coordinator.dashboard.app import LOWER_PANES, DashboardApp, save_screenshot
from atoll.coordinator.dashboard.panes import (
    EventsPane,
    LossPane,
    Pane,
    PeersPane,
    PhasesPane,
    RoundsPane,
    RunHeader,
    StagesPane,
)
from atoll.coordinator.dashboard.peers import columns, details
from atoll.coordinator.report import feed as feeds
from atoll.coordinator.report.feed import FeedError
from atoll.coordinator.run.status import Event, Gap
from atoll.coordinator.run.text import ABSENT

SIZES = [(80, 24), (120, 40), (200, 60)]
SVG_CELL_WIDTH = 12.2  # Textual's
HOSTILE = "\x1b[2J[red]x[/red] [@click=app.leave]hit[/] \u202e\x07\n名"


class Source:
    """A feed that is told what to answer."""

    def __init__(self, answer):
        self.answer = answer

    async def __call__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def with_app(status, check, *, size=(120, 40), **options):
    """Run `check(app, source, clock, pilot)` inside a running app that has read `status`."""
    source, clock = Source(status), Clock()
    app = DashboardApp(source, interval_s=None, clock=clock, **options)

    async def main():
        async with app.run_test(size=size) as pilot:
            await app.poll()
            await pilot.pause()
            await check(app, source, clock, pilot)

    asyncio.run(main())
    return app


def screen(app):
    """The text on the screen, line by line."""
    pattern = r'<text [^>]*x="([\d.]+)" y="([\d.]+)" textLength[^>]*>([^<]*)</text>'
    rows = {}
    for x, y, text in re.findall(pattern, app.export_screenshot()):
        row = rows.setdefault(float(y), "").ljust(round(float(x) / SVG_CELL_WIDTH))
        rows[float(y)] = row + html.unescape(text).replace("\xa0", " ")
    return "\n".join(rows[y] for y in sorted(rows))


def plain(app, kind):
    return app.query_one(kind).render().plain


def shown(app):
    return [pane.id for pane in app.query(Pane) if pane.display]


def test_the_header_names_the_run_and_its_progress(sample):
    async def check(app, source, clock, pilot):
        text = plain(app, RunHeader)
        for piece in (
            "python-1m", " TRAINING ", "chain 9f3ac1d0", "● live", "round 37/120", "31%",
            "25m 05s left", "18s per round", "loss 1.419", "valid 1.479", "tokens/s 52.5k",
            "tokens 11.4M", "util 96.4%", "peers 4/5", "sent 196 MB", "method diloco H=30",
            "codec int8", "params 1.05M", "elapsed 11m 13s",
        ):  # fmt: skip
            assert piece in text, piece

    with_app(sample(37), check)


def test_the_rate_of_a_link_that_is_not_known_is_a_dash(sample):
    peer = replace(sample(37).peers[0], downlink_mbit_s=0.0)
    assert f"up 20 Mbit/s down {ABSENT} chain" in details(peer, 200).plain


def test_every_peer_has_a_row_and_the_chosen_one_details(sample):
    async def check(app, source, clock, pilot):
        rows = plain(app, PeersPane).split("\n")
        names = [row.split()[1] for row in rows[1:6]]
        assert names == ["basalt", "coral", "drift", "ebb", "fathom"]
        assert "compute" in rows[1] and " 5/30" in rows[1] and "97%" in rows[1]
        assert rows[5].startswith("○ fathom") and "gone" in rows[5] and "5m 12s" in rows[5]
        assert "basalt" in rows[6] and "NVIDIA H100" in rows[6] and "up 20 Mbit/s" in rows[6]
        assert "■ wait 0.65s" in rows[7] and "■ apply 0.06s" in rows[7]
        await pilot.press("down", "down")
        details = plain(app, PeersPane).split("\n")[6]
        assert "drift" in details and "mps Apple M3" in details

    with_app(sample(37), check)


def test_the_chosen_peer_stays_chosen_when_others_join_before_it(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("down")
        newcomer = replace(sample(37).peers[0], name="aaa", peer_id="new")
        source.answer = replace(sample(37), peers=[newcomer, *sample(37).peers])
        await app.poll()
        assert app.query_one(PeersPane).chosen.name == "coral"

    with_app(sample(37), check)


def test_rows_are_in_the_same_order_whatever_the_feed_does(sample):
    status = sample(37)

    async def check(app, source, clock, pilot):
        before = plain(app, PeersPane)
        source.answer = replace(status, peers=list(reversed(status.peers)))
        await app.poll()
        assert plain(app, PeersPane) == before

    with_app(status, check)


@pytest.mark.parametrize("position", [pytest.param(0, marks=pytest.mark.exhaustive), 700])
def test_every_size_is_filled_without_spilling(sample, position):
    async def check(app, source, clock, pilot):
        for size in SIZES:
            await pilot.resize_terminal(*size)
            for number, name in enumerate(("peers", *LOWER_PANES), start=1):
                await pilot.press(str(number))
                pane = app.query_one(f"#{name}")
                assert pane.display and pane.has_focus
                width, height = pane.size
                lines = pane.render().split("\n")
                assert len(lines) <= height, (size, name)
                assert all(line.cell_length <= width for line in lines), (size, name)
            assert app.query_one("Footer").region.bottom == size[1]

    with_app(sample(position, rounds_total=0 if position == 700 else 120), check)


def test_a_pipeline_fills_small_and_large_screens(staged):
    async def check(app, source, clock, pilot):
        for size in SIZES[::2]:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            for pane in app.query(Pane).results(Pane):
                if pane.display:
                    width, height = pane.size
                    lines = pane.render().split("\n")
                    assert len(lines) <= height, (size, pane.id)
                    assert all(line.cell_length <= width for line in lines), (size, pane.id)
            assert app.query_one("Footer").region.bottom == size[1]
            text = screen(app)
            assert all(f"stage-{n}" in text for n in (1, 2, 3)), size
            assert plain(app, LossPane), size
        await pilot.press("shift+tab")
        assert app.query_one(StagesPane).has_focus

    with_app(staged(), check)


def test_stages_are_columns_and_the_one_that_binds_is_marked(staged):
    async def check(app, source, clock, pilot):
        rows = plain(app, StagesPane).split("\n")
        assert rows[0].split("→")[1].split() == ["stage-2", "·", "2", "peers", "▲", "binds"]
        assert rows[0].count("→") == 2 and rows[0].count("binds") == 1
        assert [row.count("tok/s") for row in rows[1:3]] == [3, 0]
        assert rows[1].count("round 37") == 2 and "round 38" in rows[1]
        assert "81%" in rows[2]
        assert [piece.strip() for piece in rows[3].split("waits for ")[1:]] == [
            "end of step",
            "gradients",
            "input",
        ]
        assert "8 in flight · 0 queued · 0 omitted" in rows[4]
        assert "6 in flight · 2 queued · 3 omitted · 4 twice" in rows[4]
        assert re.findall(r"● (\w+)", rows[5]) == ["basalt", "coral", "drift"]
        header = plain(app, RunHeader)
        assert "3 stages · stage-2 binds" in header and "chain" not in header
        assert "of stage-3" in str(app.query_one(RoundsPane).border_subtitle)

    with_app(staged(), check, size=(160, 50))


def test_peers_of_a_pipeline_are_sorted_by_stage(staged):
    async def check(app, source, clock, pilot):
        head, *rows = plain(app, PeersPane).split("\n")
        assert head.split()[:3] == ["peer", "stage", "state"]
        found = re.findall(r"stage-\d+", "\n".join(rows))
        assert found == [f"stage-{n}" for n in range(1, 12) for _ in "ab"]
        assert "waits for end of step in flight 4" in plain(app, PeersPane)

    with_app(staged(stages=11), check, size=(200, 90))


def test_more_stages_than_fit_can_be_scrolled_to(staged):
    async def check(app, source, clock, pilot):
        pane = app.query_one(StagesPane)
        assert "stage-4" not in plain(app, StagesPane)
        assert "1 to 3 of 11" in str(pane.border_subtitle)
        await pilot.press("0", *["right"] * 20)
        assert "stage-11" in plain(app, StagesPane)
        assert "9 to 11 of 11" in str(pane.border_subtitle)
        await pilot.resize_terminal(200, 60)
        await pilot.pause()
        assert "stage-5" in plain(app, StagesPane) and "stage-11" in plain(app, StagesPane)

    with_app(staged(stages=11), check, size=(80, 24))


def test_a_dense_run_has_no_stages_on_its_screen(sample):
    async def check(app, source, clock, pilot):
        assert shown(app) == ["peers", "loss", "phases", "rounds", "events"]
        await pilot.press("0")
        assert app.query_one(PeersPane).has_focus
        await pilot.press("shift+tab")
        assert app.query_one(EventsPane).has_focus
        text = screen(app)
        assert "stage" not in text and "binds" not in text

    with_app(sample(37), check)


def test_the_stages_of_a_stranger_are_shown_and_not_obeyed(staged):
    status = staged()
    module = replace(status.modules[0], name=HOSTILE, waits_for=HOSTILE)
    peers = [replace(peer, name=HOSTILE, module=HOSTILE) for peer in status.peers]

    async def check(app, source, clock, pilot):
        text = screen(app)
        assert "[red]x" in text
        assert not set(text) & set("\x1b\x07\u202e")
        content = app.query_one(StagesPane).render()
        assert not any(str(span.style) == "red" for span in content.spans)

    with_app(replace(status, modules=[module], peers=peers), check, size=(200, 60))


def test_a_tiny_screen_shows_what_it_can(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("tab", "tab", "down", "tab", "tab", "z")
        await pilot.press("z")
        await pilot.resize_terminal(1, 1)
        await app.poll()
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "round 37/120" in screen(app)

    with_app(sample(37), check, size=(30, 8))


def test_a_large_screen_shows_all_panes_and_a_small_one_one_of_four(sample):
    async def all_of_them(app, source, clock, pilot):
        assert shown(app) == ["peers", "loss", "phases", "rounds", "events"]

    async def one(app, source, clock, pilot):
        assert shown(app) == ["peers", "loss"]
        assert "loss phases rounds events" in screen(app)
        await pilot.press("tab", "tab")
        assert shown(app) == ["peers", "phases"]
        await pilot.press("5")
        assert shown(app) == ["peers", "events"]
        await pilot.press("tab")
        assert app.query_one(PeersPane).has_focus

    with_app(sample(37), all_of_them, size=(120, 40))
    with_app(sample(37), one, size=(80, 24))


def test_resizing_brings_the_panes_back(sample):
    async def check(app, source, clock, pilot):
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert shown(app) == ["peers", "loss", "phases", "rounds", "events"]
        assert "╭─ loss ─" in screen(app)

    with_app(sample(37), check, size=(80, 24))


def test_columns_leave_before_the_screen_gets_crowded(sample):
    async def narrow(app, source, clock, pilot):
        heading = plain(app, PeersPane).split("\n")[0].split()
        assert {"peer", "state", "window", "tok/s", "loss", "util"} <= set(heading)
        assert not {"seen", "recv"} & set(heading)

    async def wide(app, source, clock, pilot):
        text = plain(app, PeersPane)
        assert {"seen", "recv"} <= set(text.split("\n")[0].split())
        assert "20 Mb/s" in text and "training · compute" in text

    with_app(sample(37), narrow, size=(80, 24))
    with_app(sample(37), wide, size=(200, 60))


def test_more_peers_than_fit_can_be_scrolled_to(sample):
    async def check(app, source, clock, pilot):
        assert "kelp-3" not in plain(app, PeersPane)
        await pilot.press("end")
        assert "kelp-3" in plain(app, PeersPane)
        assert app.query_one(PeersPane).region.height <= 12

    with_app(sample(37, num_peers=40), check, size=(80, 24))


def test_a_lost_connection_keeps_the_last_state_and_shows_its_age(sample):
    async def check(app, source, clock, pilot):
        source.answer = ConnectionError("no route to host")
        clock.now_s += 12
        await app.poll()
        await app.poll()
        await pilot.pause()
        text = screen(app)
        assert "◌ connection lost · status is 12s old · attempt 3" in text
        assert "cannot read the status of the run: no route to host" in text
        assert "round 37/120" in text and "basalt" in text
        clock.now_s += 8
        app.tick()
        assert "status is 20s old" in plain(app, RunHeader)
        source.answer = sample(38)
        await app.poll()
        assert "● live" in plain(app, RunHeader) and "round 38/120" in plain(app, RunHeader)

    with_app(sample(37), check)


def test_without_a_first_state_the_screen_says_so():
    async def check(app, source, clock, pilot):
        assert "◌ no connection · attempt 2" in plain(app, RunHeader)
        assert "no peer has joined yet" in screen(app)

    with_app(ConnectionError("refused"), check)


def test_a_feed_that_never_answers_is_a_lost_connection(monkeypatch):
    async def never():
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(feeds, "TIMEOUT_S", 0.01)
    with pytest.raises(FeedError, match="no answer within"):
        asyncio.run(feeds.read(never))


def test_retries_slow_down_to_a_limit_and_never_end():
    waits = [feeds.retry_s(n, 1.0) for n in (0, 1, 2, 3, 1000)]
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_an_old_state_of_a_slow_feed_shows_its_age(sample):
    async def check(app, source, clock, pilot):
        clock.now_s += 4
        app.tick()
        assert "● live · 4.0s old" in plain(app, RunHeader)

    with_app(sample(37), check)


def test_pause_holds_the_screen_still_and_catches_up(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("p")
        source.answer = sample(50)
        await app.poll()
        assert "round 37/120" in plain(app, RunHeader) and "‖ paused" in plain(app, RunHeader)
        await pilot.press("p")
        assert "round 50/120" in plain(app, RunHeader) and "● live" in plain(app, RunHeader)

    with_app(sample(37), check)


def test_the_loss_can_be_logarithmic_and_raw(sample):
    async def check(app, source, clock, pilot):
        linear = plain(app, LossPane)
        assert "linear · smoothed" in str(app.query_one(LossPane).border_subtitle)
        await pilot.press("l")
        assert plain(app, LossPane) != linear
        await pilot.press("s")
        assert "log · raw" in str(app.query_one(LossPane).border_subtitle)
        await pilot.press("l", "s")
        assert plain(app, LossPane) == linear

    with_app(sample(37), check)


def test_the_waterfall_follows_the_chosen_round(sample):
    async def check(app, source, clock, pilot):
        lines = plain(app, PhasesPane).split("\n")
        assert lines[0].split()[:2] == ["round", "37"]
        assert [line.split()[0] for line in lines[1:5]] == ["basalt", "coral", "drift", "ebb"]
        await pilot.press("4", "down", "down")
        assert plain(app, PhasesPane).split("\n")[0].split()[:2] == ["round", "35"]

    with_app(sample(37), check)


def test_rounds_are_listed_newest_first_with_peers_left_out(sample):
    async def check(app, source, clock, pilot):
        rows = plain(app, RoundsPane).split("\n")
        assert [row.split()[0] for row in rows[:4]] == ["round", "13", "12", "11"]
        assert "fathom" in rows[1] and "4.24 MB" in rows[1]

    with_app(sample(13), check, size=(200, 60))


def test_the_chosen_round_shows_peers_left_out_and_why(sample):
    status = sample(13)
    absent, partial = status.peers[4].peer_id, status.peers[2].peer_id
    last = replace(status.history[-1], reasons={absent: "sent nothing", partial: HOSTILE})
    told = [*status.history[:-1], last]

    async def check(app, source, clock, pilot):
        rows = plain(app, RoundsPane).split("\n")
        assert "without fathom: sent nothing; drift in part: ·[2J[red]x" in rows[-2]
        assert len(rows) == app.query_one(RoundsPane).size.height
        assert "fathom: sent nothing" in rows[1] and "fathom" not in rows[2]
        await pilot.press("4", "down")
        assert "round 12 no peer was left out" in plain(app, RoundsPane)
        await pilot.press("down")
        assert "round 11 update not stored" in plain(app, RoundsPane)

    gaps = [Gap(first=9, last=11)]
    with_app(replace(status, history=told, gaps=gaps), check, size=(200, 60))


def test_a_round_whose_traces_have_not_come_has_dashes_for_numbers(sample):
    status = sample(13)
    newest = replace(status.history[-1], seconds={}, wire_bytes=0)

    async def check(app, source, clock, pilot):
        row = plain(app, RoundsPane).split("\n")[1]
        assert row.split().count(ABSENT) == 2 and "0 B" not in row

    with_app(replace(status, history=[*status.history[:-1], newest]), check, size=(200, 60))


def test_a_warning_is_news_on_every_size_of_screen_and_not_for_ever(sample):
    status = sample(37)
    old = Event(at=status.now - 61, level="error", source="coordinator", text="long ago")
    first, second = (
        Event(at=status.now - 9 + i, level="warning", source=status.peers[1].peer_id, text=text)
        for i, text in enumerate(("left out", HOSTILE))
    )

    async def check(app, source, clock, pilot):
        assert "▲" not in plain(app, RunHeader) and "long ago" not in plain(app, RunHeader)
        source.answer = replace(status, events=[old, first, second])
        await app.poll()
        await pilot.pause()
        news = plain(app, RunHeader).split("\n")[-1]
        assert news.startswith(" ▲ ") and "coral: ·[2J[red]x" in news and "1 more" in news
        assert app.query_one(RunHeader).size.height == len(plain(app, RunHeader).split("\n"))

    with_app(replace(status, events=[old]), check, size=(80, 24))


def test_where_room_is_short_the_shortest_phases_give_way(sample):
    status = sample(37)
    seconds = {"wait": 1.2, "encode": 0.001, "send": 0.4, "reduce": 0.3, "vote": 0.2, "apply": 0.1}
    chosen = replace(status.peers[0], phases=seconds)

    async def check(app, source, clock, pilot):
        last_round = plain(app, PeersPane).split("\n")[-1]
        assert "wait 1.20s" in last_round and "apply 0.10s" in last_round
        assert "encode" not in last_round and "…" not in last_round

    with_app(replace(status, peers=[chosen]), check, size=(80, 24))


def test_the_log_follows_its_end_until_it_is_scrolled_up(sample):
    def joined(n):
        return Event(at=1.0 + n, source="coordinator", text=f"happened {n}")

    async def check(app, source, clock, pilot):
        await pilot.press("5")
        assert "happened 99" in plain(app, EventsPane)
        await pilot.press("pageup")
        held = plain(app, EventsPane)
        assert "happened 99" not in held
        source.answer = replace(sample(1), events=[joined(n) for n in range(110)])
        await app.poll()
        assert plain(app, EventsPane) == held
        await pilot.press("end")
        assert "happened 109" in plain(app, EventsPane)

    with_app(replace(sample(1), events=[joined(n) for n in range(100)]), check)


def test_levels_have_colours_and_the_source_its_name(sample):
    async def check(app, source, clock, pilot):
        content = app.query_one(EventsPane).render()
        warned = content.plain.index("owner went silent")
        assert "$warn" in {s.style for s in content.spans if s.start <= warned < s.end}
        assert "basalt" in content.plain

    with_app(sample(14), check)


def test_markup_and_escapes_of_a_stranger_are_shown_and_not_obeyed(sample):
    status = sample(3, num_peers=1, num_gone=0)
    peer = replace(
        status.peers[0], name=HOSTILE, phase=HOSTILE, device=HOSTILE, version=HOSTILE,
        phases={HOSTILE: 1.0, "wait": 1.0},
    )  # fmt: skip
    hostile = replace(
        status,
        run_name=HOSTILE,
        codec=HOSTILE,
        method=HOSTILE,
        peers=[peer],
        events=[Event(at=1.0, level="error", source=HOSTILE, text=HOSTILE)],
        history=[replace(row, left_out=[HOSTILE]) for row in status.history],
    )

    async def check(app, source, clock, pilot):
        text = screen(app)
        assert "[red]x[/red]" in text
        assert not set(text) & set("\x1b\x07\u202e")
        for widget in app.query("RunHeader, Pane"):
            content = widget.render()
            assert not set(content.plain) & set("\x1b\x07\u202e\r")
            assert not any(str(span.style) == "red" for span in content.spans)

    with_app(hostile, check, size=(200, 60))


def test_a_failure_with_markup_is_shown_as_it_is(sample):
    async def check(app, source, clock, pilot):
        source.answer = ValueError("[bold]\x1b[31mboom")
        await app.poll()
        await pilot.pause()
        assert "[bold]·[31mboom" in screen(app)

    with_app(sample(3), check)


def test_q_quits_and_calls_the_embedding_program(sample):
    told = []

    async def check(app, source, clock, pilot):
        await pilot.press("q")

    app = with_app(sample(3), check, on_quit=lambda: told.append(True))
    assert told == [True]
    assert app.return_code == 0


def test_a_finished_run_lingers_and_closes_by_itself(sample):
    told = []

    async def check(app, source, clock, pilot):
        assert " FINISHED " in plain(app, RunHeader)
        assert "closes in 5.0s" in plain(app, RunHeader)
        clock.now_s += 4
        await app.poll()
        app.tick()
        assert "closes in 1.0s" in plain(app, RunHeader)
        assert app._exit is False
        clock.now_s += 1
        app.tick()
        assert app._exit is True

    with_app(sample(9, state="finished"), check, linger_s=5.0, on_quit=lambda: told.append(True))
    assert told == []


def test_any_key_keeps_a_finished_run_on_the_screen(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("down")
        clock.now_s += 100
        await app.poll()
        app.tick()
        assert app._exit is False
        assert "closes" not in plain(app, RunHeader)

    with_app(sample(9, state="finished"), check, linger_s=5.0)


def test_a_waiting_run_shows_how_many_peers_it_needs(sample):
    async def check(app, source, clock, pilot):
        assert " WAITING " in plain(app, RunHeader)
        assert "1 of 2 peers online; the run starts with 1 more" in plain(app, RunHeader)

    with_app(sample(0, state="waiting", num_peers=2), check)


def test_help_opens_over_the_screen_and_closes(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert "loss: log scale; smoothed" in screen(app)
        source.answer = sample(38)
        await app.poll()
        await pilot.press("escape")
        await pilot.pause()
        assert "round 38/120" in screen(app)

    with_app(sample(37), check)


def test_zoom_gives_one_pane_the_screen(sample):
    async def check(app, source, clock, pilot):
        await pilot.press("4", "z")
        await pilot.pause()
        assert app.query_one(RoundsPane).region.height > 30
        await pilot.press("z")
        await pilot.pause()
        assert app.query_one(RoundsPane).region.height < 20

    with_app(sample(37), check)


@pytest.mark.parametrize("light", [False, True])
def test_both_themes_know_every_colour(sample, light):
    async def check(app, source, clock, pilot):
        assert app.current_theme.dark is not light
        before = app.export_screenshot()
        await pilot.press("t")
        await pilot.pause()
        assert app.current_theme.dark is light
        assert app.export_screenshot() != before

    with_app(sample(37), check, light=light)


def test_polling_by_itself(sample):
    async def main():
        polled = asyncio.Event()

        async def feed():
            polled.set()
            return sample(5)

        app = DashboardApp(feed, interval_s=0.01)
        async with app.run_test(size=(80, 24)) as pilot:
            await asyncio.wait_for(polled.wait(), 5)
            await pilot.pause()
            assert "round 5/120" in plain(app, RunHeader)

    asyncio.run(main())


def test_a_screenshot_is_written_after_the_first_state(sample, tmp_path):
    path = tmp_path / "dashboard.svg"
    asyncio.run(save_screenshot(Source(sample(37)), path, width=100, height=30))
    svg = path.read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "python-1m" in svg and "Zoom" in svg


def test_no_screenshot_of_a_lost_connection(tmp_path):
    path = tmp_path / "dashboard.svg"
    with pytest.raises(FeedError, match="refused"):
        asyncio.run(save_screenshot(Source(ConnectionError("refused")), path))
    assert not path.exists()


def test_a_peer_that_trains_before_its_first_round_is_not_called_idle(sample):
    peer = replace(sample(1).peers[0], state="training", phase="idle")
    (column,) = (column for column in columns() if column.title == "state")
    for width in (4, 20):
        assert column.draw(peer, width).plain == "training"
