"""The frame of an HTML page that stands alone: style, head, tables. Pure.

No script, nothing fetched: a policy in the page forbids both, so that what a server under test said can do nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Raw", "badge", "page", "table"]

_STYLE = """
:root{--bg:#fff;--fg:#1c2127;--dim:#57606a;--line:#d0d7de;--soft:#f6f8fa;--pass:#116329;--passbg:#dafbe1;--fail:#a40e26;
--failbg:#ffebe9;--inconclusive:#744d00;--inconclusivebg:#fff3c4;--skipped:#57606a;--skippedbg:#eef1f4;--link:#0550ae;
--c1:#0b61a4;--c2:#b3450b;--c3:#1a7f4b;--c4:#7a35d6;--c5:#a3195b;--c6:#00707a;--c7:#6b5d00;--c8:#444c56;--on:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#0f1317;--fg:#e6e9ec;--dim:#a0a9b3;--line:#353c45;--soft:#181d23;--pass:#7ee2a0;
--passbg:#0f2e1b;--fail:#ff9a94;--failbg:#3d1214;--inconclusive:#f2cc60;--inconclusivebg:#33270a;--skipped:#a0a9b3;
--skippedbg:#22282f;--link:#79c0ff;--c1:#6cb6ff;--c2:#ff9f5a;--c3:#57d18c;--c4:#c4a1ff;--c5:#ff8fc0;--c6:#4fd0d9;
--c7:#d9c65a;--c8:#b8c0cc;--on:#0f1317}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444;--line:#999;--soft:#fff;--pass:#116329;--passbg:#fff;--fail:#a40e26;
--failbg:#fff;--inconclusive:#744d00;--inconclusivebg:#fff;--skipped:#444;--skippedbg:#fff;--c1:#0b61a4;--c2:#b3450b;
--c3:#1a7f4b;--c4:#7a35d6;--c5:#a3195b;--c6:#00707a;--c7:#6b5d00;--c8:#444c56;--on:#fff}
figure,tr,.card{break-inside:avoid}h2,h3{break-after:avoid}.scroll{overflow:visible!important}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main,header,footer{max-width:1320px;margin:0 auto;padding:0 max(16px,env(safe-area-inset-left))}
header{padding-top:20px}footer{padding-top:24px;padding-bottom:32px;color:var(--dim);font-size:14px}
h1{font-size:26px;line-height:1.25;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:21px;margin:36px 0 10px;padding-top:14px;border-top:1px solid var(--line);overflow-wrap:anywhere}
h2 .dim{font-size:16px;font-weight:400}
h3{font-size:17px;margin:24px 0 8px}
p{margin:8px 0;overflow-wrap:anywhere}
a{color:var(--link)}
.badge{display:inline-block;padding:1px 9px;border-radius:99px;font-size:14px;font-weight:600;white-space:nowrap;border:1px solid currentColor}
.pass{color:var(--pass);background:var(--passbg)}.fail{color:var(--fail);background:var(--failbg)}
.inconclusive{color:var(--inconclusive);background:var(--inconclusivebg)}.skipped{color:var(--skipped);background:var(--skippedbg)}
.note{border:1px solid currentColor;border-radius:6px;padding:10px 14px;margin:12px 0;overflow-wrap:anywhere}
.dim{color:var(--dim)}
dl{display:grid;grid-template-columns:minmax(90px,max-content) minmax(0,1fr);gap:3px 16px;margin:10px 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:10px 0}
table{border-collapse:collapse;font-size:14.5px;width:100%}
caption{text-align:left;color:var(--dim);padding:0 0 6px}
th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;white-space:nowrap}thead th{border-bottom:2px solid var(--line);background:var(--soft)}
td:first-child{white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:13.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code{background:var(--soft);padding:1px 5px;border-radius:4px;overflow-wrap:anywhere}
pre{background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:10px 12px;margin:6px 0;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
@media print{pre{max-height:none}details.check::details-content,details.told::details-content{content-visibility:visible;
block-size:auto}main,header,footer{max-width:none;padding-left:0;padding-right:0}th,td{padding:3px 5px}th,th.n{white-space:normal}
td{overflow-wrap:anywhere}td.n,td:first-child{overflow-wrap:normal}table{font-size:10.5px}.charts{grid-template-columns:1fr 1fr 1fr}
@page{size:landscape;margin:12mm}}
.check{border-bottom:1px solid var(--line);padding:5px 14px;margin:0;overflow-wrap:anywhere}
.check.card{border:1px solid var(--line);border-radius:6px;padding:9px 14px;margin:8px 0}
.check p{margin:4px 0}.top{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:baseline}
.top code{font-weight:600}.top .dim{margin-left:auto;font-size:14px}summary.top{color:var(--fg)}
summary.top::after{content:"▸";color:var(--link)}details[open]>summary.top::after{content:"▾"}
details{margin:6px 0}summary{cursor:pointer;padding:3px 0;color:var(--link)}
summary:focus-visible,.scroll:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:16px}
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:10px 12px;min-width:0}
figcaption{font-weight:600;font-size:15px;margin-bottom:6px}
svg{display:block;width:100%;height:auto;max-width:560px}
svg text{fill:var(--fg);font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
svg .value{paint-order:stroke;stroke:var(--bg);stroke-width:3px}svg .tick{fill:var(--dim)}svg .value{font-weight:600}svg .inside{fill:var(--on);font-weight:600}
svg .axis{stroke:var(--dim)}svg .grid{stroke:var(--line)}svg .mark{stroke:var(--fg);stroke-dasharray:4 3}
svg .line{fill:none;stroke-width:2}
svg .hollow{fill:var(--bg);stroke-width:2}
.worse{color:var(--fail);font-weight:600}.better{color:var(--pass);font-weight:600}
@media (max-width:520px){dl{grid-template-columns:minmax(0,1fr);gap:0}dd{margin-bottom:6px}h1{font-size:23px}figure{padding:8px 6px}main,header,footer{padding-left:12px;padding-right:12px}}
nav ul{display:flex;flex-wrap:wrap;gap:6px 16px;padding:0;margin:12px 0;list-style:none}
"""
_SERIES = "".join(
    f"svg .s{n}{{fill:var(--c{n})}}svg .c{n}{{stroke:var(--c{n})}}svg .s{n}.hollow{{fill:var(--bg);stroke:var(--c{n})}}"
    for n in range(1, 9)
)


class Raw(str):
    """HTML already: not escaped again."""


def badge(verdict: str) -> Raw:
    """A verdict as a word in its colour."""
    marks = {"pass": "✓", "fail": "✗", "inconclusive": "?", "skipped": "–"}
    mark = marks.get(verdict, "")
    return Raw(
        f'<span class="badge {escape(verdict)}"><span aria-hidden="true">{mark} </span>{escape(verdict)}</span>'
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], caption: str, *, numbers: Sequence[int] = ()
) -> Raw:
    """A table that scrolls by itself where the window is narrow.

    :param numbers: places of columns that are flush right.
    """

    def cell(tag: str, place: int, text: str) -> str:
        more = ' class="n"' if place in numbers else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{more}>{text if isinstance(text, Raw) else escape(text)}</{tag}>"

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, place, text) for place, text in enumerate(cells))}</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    return Raw(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead>{row('th', head)}</thead>\n<tbody>{body}</tbody></table></div>"
    )


def page(title: str, header: str, body: str, footer: str = "") -> str:
    """The document; ``header``, ``body`` and ``footer`` are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_SERIES}</style>\n</head>\n<body>\n"
        f"<header>{header}</header>\n<main>{body}</main>\n<footer>{footer}</footer>\n</body>\n</html>\n"
    )
