"""The page in a headless browser: it draws, it answers to keys and mouse, it asks for nothing."""

from __future__ import annotations

import shutil

import pytest
import recorded
from ledger_kit.mutants import KeepsOneRowTooMany, LoadsAnotherBlock

from kvtxn.audit import RecordingLedger, RowGroup, Step

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
torch = pytest.importorskip("torch")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the path")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        one = started.chromium.launch(executable_path=BROWSER)
        yield one
        one.close()


@pytest.fixture
def show(browser, tmp_path):
    """Open a page; whatever it asks for or complains of makes the test fail."""
    wrong, opened = [], []

    def show(result, **settings):
        path = tmp_path / "page.html"
        path.write_text(recorded.html(result))
        tab = browser.new_page(viewport={"width": 1200, "height": 900}, **settings)
        opened.append(tab)
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: wrong.append(r.url) if r.url != path.as_uri() else None)
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=20_000)
        return tab

    yield show
    for tab in opened:
        tab.close()
    assert wrong == []


def played(policy=None):
    """A prompt of 6, a step with three drafts of which one is kept, and the end of the request."""
    ledger = RecordingLedger([RowGroup("group.0", 4, 10)], max_requests=2, max_length=32)

    def step(first, tokens, slots, drafts):
        return Step(
            lines=torch.tensor([ledger.line("a")]),
            starts=torch.tensor([0, len(tokens)]),
            first=torch.tensor([first]),
            tokens=torch.tensor(tokens),
            slots={"group.0": torch.tensor(slots)},
            tables={"group.0": torch.tensor([[2, 3, 5]])},
            drafts=torch.tensor([drafts]),
        )

    ledger.admit("a", [1, 2, 3, 4, 5, 6])
    ledger.hand_out("group.0", [2, 3])
    ledger.write(step(0, [1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13], 0))
    ledger.publish("a", "group.0", [2, 3], 0, 4)
    ledger.hand_out("group.0", [5])
    ledger.write(step(6, [7, 8, 9, 10], [14, 15, 20, 21], 3))
    ledger.resolve([1])
    ledger.release("a")
    ledger.write(Step(**EMPTY))
    found = recorded.found(steps=2)
    found.recordings[:] = [{**ledger.recording(), "policy": policy}]
    return found


EMPTY = {
    "lines": torch.tensor([-1]),
    "starts": torch.tensor([0, 0]),
    "first": torch.tensor([0]),
    "tokens": torch.tensor([0]),
    "slots": {"group.0": torch.tensor([-1])},
}

STATES = """(slot) => {
  const group = page.groups[0], row = group.rowOf(slot);
  return [2, 3, 4, 5, 6].map((time) => {
    const index = group.at(row, time);
    return index < 0 ? "unused" : STATES[group.rows[row][index].state].key;
  });
}"""


@pytest.mark.parametrize("policy", [None, "deferred"])
def test_a_slot_has_its_states_in_order(show, policy):
    """A step has two times; a window leaves the slot of a rejected draft as it was."""
    tab = show(played(policy))
    blank = "empty" if policy else "rejected"
    ended = "empty" if policy else "left"
    expected = {
        8: ["published", "published", "published", "idle", "idle"],
        12: ["durable", "durable", "durable", "left", "left"],
        14: ["empty", "empty", "durable", "left", "left"],
        15: ["empty", "empty", "draft", "left", "left"],
        20: ["unused", "unused", "draft", ended, ended],
        22: ["unused", "unused", "empty", "empty", "empty"],
    }
    assert {slot: tab.evaluate(STATES, slot) for slot in expected} == expected
    life = tab.evaluate(
        "page.groups[0].rows[page.groups[0].rowOf(20)].map(e => STATES[e.state].key)"
    )
    assert life[:3] == ["empty", "draft", blank]
    assert tab.evaluate("page.groups[0].blocks") == [2, 3, 5]


COLOURS = """() => {
  const pixels = picture.context.getImageData(100, 20, 600, 200).data;
  return new Set(new Uint32Array(pixels.buffer)).size;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_healthy_engine(show, scheme):
    """In the reader's colours; a request can be picked out."""
    tab = show(recorded.found(), color_scheme=scheme)
    assert tab.inner_text("h1").startswith("Healthy: ")
    assert tab.is_hidden("#violations-section")
    assert tab.is_hidden("#jumps")
    assert tab.locator("#requests tbody tr").count() > 5
    assert tab.evaluate(COLOURS) > 4
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[scheme]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.locator("#requests tbody button").first.click()
    assert tab.evaluate("picture.request") == 0
    assert tab.locator("#requests tr.chosen").count() == 1
    tab.locator("#requests tbody button").first.click()
    assert tab.evaluate("picture.request") == -1


def test_a_violation_is_one_key_away(show):
    """``n`` goes to it, names it, and shows the life of its slot."""
    result = recorded.found(engine=KeepsOneRowTooMany)
    violation = result.recordings[0]["violations"][0]
    tab = show(result)
    tab.focus("#picture")
    tab.keyboard.press("n")
    assert tab.inner_text("#status").startswith("violation 1 of ")
    assert tab.inner_text("#slot-title") == f"Slot {violation['slot']}"
    assert violation["kind"] in tab.inner_text("#slot-life")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#status").startswith(f"slot {violation['slot']} (block ")
    tab.click("#violations tbody tr:last-child button")
    count = len(result.recordings[0]["violations"])
    assert tab.inner_text("#status").startswith(f"violation {count} of {count}")


def test_a_row_that_a_connector_brought_is_told_as_such(show):
    """The request that a row was brought for has not written it."""
    result = recorded.found(engine=LoadsAnotherBlock)
    kinds = [each["kind"] for each in result.recordings[0]["violations"]]
    tab = show(result)
    tab.locator("#violations tbody tr button").nth(kinds.index("imported")).click()
    status = tab.inner_text("#status")
    assert "; a connector brought it for " in status
    assert "written" not in status


def test_keys_and_mouse_move_and_zoom(show):
    tab = show(recorded.found())
    tab.focus("#picture")
    whole = tab.evaluate("({...picture.view})")
    tab.keyboard.press("ArrowDown")
    first = tab.inner_text("#status")
    tab.keyboard.press("Shift+ArrowRight")
    assert tab.inner_text("#status") != first
    tab.keyboard.press("Enter")
    assert tab.locator("#slot-life li").count() > 0
    for _ in range(4):
        tab.keyboard.press("+")
    assert tab.evaluate("picture.view.width") < whole["width"] / 3
    tab.keyboard.press("0")
    assert tab.evaluate("({...picture.view})") == whole
    tab.keyboard.press("Escape")
    assert tab.evaluate("picture.cursor") is None
    box = tab.locator("#picture").bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 100)
    assert "step" in tab.inner_text("#tip")
    tab.mouse.click(box["x"] + 300, box["y"] + 100)
    assert tab.inner_text("#slot-title").startswith("Slot ")
    tab.mouse.wheel(0, -400)
    assert tab.evaluate("picture.view.width") < 120


def test_ten_thousand_slots(show):
    """All of them in one picture, drawn in a moment; each can be zoomed to."""
    tab = show(recorded.large())
    assert tab.evaluate("picture.rows") == 10_240
    spent = tab.evaluate(
        "(() => { const t = performance.now(); picture.draw(); return performance.now() - t; })()"
    )
    assert spent < 1500
    assert tab.evaluate(COLOURS) > 4
    tab.evaluate("picture.goTo({ time: 60, row: picture.rows - 5 }, true)")
    assert tab.evaluate("picture.view.height") <= 64
    assert tab.evaluate("picture.plot.height / picture.view.height") > 5


def test_several_groups_of_layers(show):
    """Each has its picture; blocks of one pool are taken from one another."""
    tab = show(recorded.found("sliding", steps=40))
    assert tab.is_visible("#group")
    names = [group.name for group in recorded.GROUPS["sliding"]]
    assert tab.locator("#group option").all_inner_texts() == names
    tab.select_option("#group", "1")
    assert tab.evaluate("picture.group.info.name") == names[1]
    taken = "page.groups.some((g) => g.rows.some((row) => row.some((e) => e.what === 'taken')))"
    assert tab.evaluate(taken)
