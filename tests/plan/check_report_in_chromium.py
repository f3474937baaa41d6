"""Open reports of plans in headless Chromium, as people see them: wide and on a phone, light and dark, and printed.

Needs a Chromium and a driver for it, neither of which the test suite asks for:

    pip install playwright && playwright install chromium     # or a Chromium of the system with --chromium
    python tests/plan/check_report_in_chromium.py report.html --pictures pictures/ --chromium /usr/bin/chromium

Fails where the page asks the network for anything, says something on the console, scrolls sideways, has text under 9 px or a
drawing without area. With --pictures it leaves PNGs and a PDF to look at.
"""

import argparse
import sys
from pathlib import Path

WIDTHS = {"wide": (1280, 900), "tablet": (768, 1024), "phone": (390, 844)}
SMALLEST = 9
# Font sizes and areas as they are shown, after every style and stretch.
LOOK = """() => {
  const shown = [...document.querySelectorAll('body *')].filter(e => e.checkVisibility());
  const texts = shown.filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !e.closest('title'));
  const scale = e => e.ownerSVGElement ? Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) : 1;
  return {
    sideways: document.documentElement.scrollWidth - window.innerWidth,
    wide: shown.filter(e => !e.closest('svg svg') && e.getBoundingClientRect().right > window.innerWidth + 1)
      .map(e => e.tagName + '.' + (e.getAttribute('class') || '')).slice(0, 5),
    small: texts.filter(e => parseFloat(getComputedStyle(e).fontSize) * scale(e) < SMALLEST).map(e => e.textContent).slice(0, 5),
    flat: [...document.querySelectorAll('svg')].filter(e => e.checkVisibility() && !e.getBoundingClientRect().width).length,
    drawings: document.querySelectorAll('svg[role=img]').length,
    heading: document.querySelector('h1').textContent,
  };
}""".replace("SMALLEST", str(SMALLEST))


def listen(page) -> tuple[list[str], list[str]]:
    """Lists that fill with what a page says on its console, and with what it asks for."""
    said, asked = [], []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    return said, asked


def check(page_file: Path, browser, pictures: Path | None) -> list[str]:
    """What is wrong with one report."""
    wrong = []
    for name, (width, height) in WIDTHS.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1)
            page = context.new_page()
            where = f"{page_file.name}, {name}, {scheme}"
            said, asked = listen(page)
            page.goto(page_file.resolve().as_uri())
            found = page.evaluate(LOOK)
            wrong += [f"{where}: {line}" for line in said]
            wrong += [f"{where}: asks for {url}" for url in asked if not url.startswith("file:")]
            if len(asked) != 1:
                wrong.append(f"{where}: loads {len(asked)} files; expected the page alone")
            if found["sideways"] > 0 or found["wide"]:
                wrong.append(f"{where}: {found['sideways']} px wider than the window: {found['wide']}")
            if found["small"]:
                wrong.append(f"{where}: text under {SMALLEST} px: {found['small']}")
            if found["flat"] or not found["drawings"]:
                wrong.append(f"{where}: {found['flat']} of {found['drawings']} drawings have no width")
            print(f"{where}: {found['heading']!r}, {found['drawings']} drawings")
            if pictures is not None:
                page.screenshot(path=pictures / f"{page_file.stem}_{name}_{scheme}.png", full_page=True)
                if name == "wide" and scheme == "light":
                    page.pdf(path=pictures / f"{page_file.stem}.pdf", format="A4")
            context.close()
    return wrong


def main() -> int:
    """Check the reports named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="HTML files of `launch/plan.py --html`")
    parser.add_argument("--pictures", type=Path, default=None, help="folder for PNGs and PDFs")
    parser.add_argument("--chromium", default=None, help="a Chromium of the system instead of playwright's own")
    args = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("error: this check drives a browser; pip install playwright && playwright install chromium")
    if missing := [report for report in args.reports if not report.is_file()]:
        sys.exit(f"error: no file {missing[0]}; write one with launch/plan.py MODEL --html FILE")
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"] if args.chromium else [])
        wrong = [line for report in args.reports for line in check(report, browser, args.pictures)]
        browser.close()
    print("\n".join(wrong) if wrong else f"{len(args.reports)} report(s) look right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
