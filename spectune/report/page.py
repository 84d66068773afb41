"""The empty page: style, the one script, and a policy that forbids the browser to load anything."""

from __future__ import annotations

import base64
import hashlib

from spectune.report.text import Html, escape

_CSS = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--muted:#5b6675;--rule:#dfe4ea;--soft:#eef1f5;
--accent:#0b62a8;--on:#00694e;--on-bg:#e0f3ec;--off:#a03d00;--off-bg:#fdebdd;--dep:#0b5a99;--dep-bg:#e2effa;
--bad:#a3211a;--bad-bg:#fbe6e4;--chosen:#f0f9f5;--code:#f1f3f6;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
@media (prefers-color-scheme:dark){:root{--bg:#10151b;--card:#181f27;--ink:#e6eaf0;--muted:#9aa6b4;
--rule:#2b3540;--soft:#212a34;--accent:#7cbcf2;--on:#63d3ab;--on-bg:#12352b;--off:#f5a871;--off-bg:#3d2413;
--dep:#8cc4f5;--dep-bg:#14304a;--bad:#ff9d94;--bad-bg:#431c19;--chosen:#16291f;--code:#212a34}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 var(--sans)}
main{max-width:1120px;margin:0 auto;padding:0 20px 64px}
a{color:var(--accent)}
h1{font-size:15px;font-weight:600;color:var(--muted);margin:0}
h2{font-size:22px;line-height:1.25;letter-spacing:-.01em;margin:0 0 4px}
h3{font-size:16px;margin:24px 0 8px}
p{margin:8px 0;max-width:74ch}
.lead{color:var(--muted);margin:0 0 14px;max-width:92ch}
details+.scroll{margin-top:16px}
section{margin-top:44px;scroll-margin-top:56px}
code,pre{font-family:var(--mono);font-size:.88em}
code{background:var(--code);border-radius:4px;padding:1px 5px;overflow-wrap:anywhere}
td code{white-space:nowrap}
pre{background:var(--code);border-radius:8px;padding:12px 14px;margin:0;overflow-x:auto;line-height:1.5;
white-space:pre-wrap;overflow-wrap:anywhere}
small{display:block;color:var(--muted);font-size:.86em}
header.top{max-width:1120px;margin:0 auto;padding:22px 20px 12px;display:flex;gap:4px 18px;flex-wrap:wrap;
align-items:baseline;justify-content:space-between}
header.top .meta{color:var(--muted);font-size:14px}
nav{position:sticky;top:0;z-index:2;background:var(--bg);border-bottom:1px solid var(--rule)}
nav div{max-width:1120px;margin:0 auto;padding:0 20px;display:flex;gap:17px;
overflow-x:auto;scrollbar-width:none}
nav a{padding:10px 0;font-size:14px;color:var(--muted);text-decoration:none;white-space:nowrap}
nav a:hover{color:var(--ink)}
.verdict{border-radius:14px;padding:28px 30px;margin-top:4px;border-left:8px solid;background:var(--dep-bg);
border-color:var(--dep)}
.verdict .word{font-size:clamp(30px,5.5vw,46px);line-height:1.1;font-weight:750;letter-spacing:-.025em;
color:var(--dep);margin:0;max-width:none}
.verdict .say{font-size:clamp(17px,2.2vw,20px);line-height:1.45;margin:12px 0 0;max-width:68ch}
.verdict .more{font-size:15px;margin:10px 0 0;max-width:90ch}
.verdict.on{background:var(--on-bg);border-color:var(--on)}.verdict.on .word{color:var(--on)}
.verdict.off{background:var(--off-bg);border-color:var(--off)}.verdict.off .word{color:var(--off)}
.verdict.bad{background:var(--bad-bg);border-color:var(--bad)}.verdict.bad .word{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin-top:14px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:14px 16px}
.tile .k{color:var(--muted);font-size:13.5px}.tile .v{font-size:26px;font-weight:700;line-height:1.25}
.tile .d{font-size:14px;overflow-wrap:anywhere}
.box{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:20px 22px}
.cmd+.cmd{margin-top:16px}h2+.box,h2+.list,h2+.empty{margin-top:12px}
.cmd .bar-top{display:flex;justify-content:space-between;align-items:center;margin-bottom:6px;font-weight:600}
button{font:600 13px/1 var(--sans);color:var(--accent);background:var(--card);border:1px solid var(--rule);
border-radius:7px;padding:8px 13px;cursor:pointer}
button:hover{background:var(--soft)}
button:focus-visible,a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.scroll{overflow-x:auto;background:linear-gradient(to right,var(--card) 40%,transparent) left/40px 100%,
linear-gradient(to left,var(--card) 40%,transparent) right/40px 100%,
linear-gradient(to right,var(--rule),transparent) left/14px 100%,
linear-gradient(to left,var(--rule),transparent) right/14px 100%,var(--card);
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll,scroll;border:1px solid var(--rule);border-radius:12px}
table{border-collapse:collapse;width:100%;font-size:14.5px;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:10px 14px 0;font-weight:600}
th{font-weight:600;text-align:left;vertical-align:bottom;color:var(--muted);font-size:13px;line-height:1.3}
th .unit{display:block;font-weight:400;font-size:12px}
th,td{padding:9px 11px;border-bottom:1px solid var(--rule)}
td{vertical-align:top;min-width:4ch}
th.num{white-space:normal;min-width:8ch}
tbody tr:last-child td{border-bottom:0}
.num{text-align:right;white-space:nowrap}
tr.base td{color:var(--muted)}tr.first td{border-top:2px solid var(--rule)}
.list-of{white-space:nowrap}
tr.chosen td{background:var(--chosen);color:var(--ink)}
tr.total td{font-weight:600;background:var(--soft)}
.ci{color:var(--muted);font-weight:400;white-space:nowrap}
td.long{min-width:20ch}
.none{color:var(--muted);cursor:help}
td sup{font-size:10.5px;color:var(--muted);margin-left:1px;line-height:0}
.notes{list-style:none;margin:8px 2px 0;padding:0;color:var(--muted);font-size:13.5px}
.notes li{margin:2px 0}
.empty{color:var(--muted);background:var(--card);border:1px dashed var(--rule);border-radius:12px;
padding:16px 18px;max-width:none}
.chip{display:inline-block;border-radius:99px;padding:1px 10px;font-size:13px;font-weight:600;
white-space:nowrap}
.chip.on{color:var(--on);background:var(--on-bg)}.chip.off{color:var(--off);background:var(--off-bg)}
.chip.bad{color:var(--bad);background:var(--bad-bg)}.chip.none-yet{color:var(--muted);background:var(--soft)}
.bar{display:inline-block;width:110px;height:9px;border-radius:5px;background:var(--soft);margin-right:10px;
overflow:hidden;vertical-align:baseline}
.bar span{display:block;height:100%;background:var(--accent);border-radius:5px}
figure{margin:18px 0}
.card{background:#fff;color:#1b2430;border:1px solid var(--rule);border-radius:12px;padding:14px;
overflow-x:auto}
.card svg{display:block;width:100%;height:auto;margin:0 auto}
.card svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{color:var(--muted);font-size:14px;margin-top:8px;max-width:80ch}
details{margin-top:14px}
summary{cursor:pointer;color:var(--accent);font-size:15px;padding:4px 0}
details>*+*{margin-top:10px}
.list{padding-left:20px;margin:8px 0;max-width:78ch}.list li{margin:6px 0}
.caution{border-left:4px solid var(--off);background:var(--off-bg);border-radius:8px;padding:4px 18px}
dl{display:grid;grid-template-columns:minmax(150px,max-content) 1fr;gap:8px 22px;margin:0;font-size:15px}
dt{font-weight:600;overflow-wrap:anywhere}dd{margin:0;overflow-wrap:anywhere}
.sim-banner{background:repeating-linear-gradient(135deg,#b3261e 0 18px,#8f1b15 18px 36px);color:#fff;
font-size:18px;font-weight:700;text-align:center;padding:14px 20px;position:sticky;top:0;z-index:3}
.sim-banner span{display:block;font-weight:500;font-size:15px}
.sim nav{position:static}
.sim-tag{background:#b3261e;color:#fff;border-radius:4px;padding:1px 7px;font-weight:700;font-size:12px}
footer{color:var(--muted);font-size:14px;margin-top:52px;border-top:1px solid var(--rule);padding-top:14px}
@media (max-width:640px){main,header.top,nav div{padding-left:14px;padding-right:14px}
.verdict{padding:22px 20px}.box{padding:16px}.card{padding:8px}.card svg{min-width:600px}
th,td{padding:8px 10px}dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:10px}section{margin-top:36px}
.sim-banner{position:static}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--muted:#444;--rule:#bbb;--soft:#f2f2f2;--code:#f5f5f5;
--on:#00694e;--on-bg:#fff;--off:#a03d00;--off-bg:#fff;--dep:#0b5a99;--dep-bg:#fff;--bad:#a3211a;--bad-bg:#fff;
--chosen:#f2f2f2;--accent:#000}
body{font-size:10.5pt}main{max-width:none;padding:0}nav,button{display:none}table{font-size:8pt}
th,td{padding:3px 5px}.scroll,.card{overflow:visible;border-radius:0}section{margin-top:22px}
figure,.tile,tr{break-inside:avoid}h2,h3{break-after:avoid}.sim-banner{position:static;
-webkit-print-color-adjust:exact;print-color-adjust:exact}.num,td code{white-space:normal}}
"""

_SCRIPT = """
function say(button,text){var old=button.dataset.label||button.textContent;button.dataset.label=old;
button.textContent=text;setTimeout(function(){button.textContent=old},1600)}
function oldCopy(text){var area=document.createElement('textarea');area.value=text;
area.style.position='fixed';area.style.opacity='0';document.body.appendChild(area);area.select();
var done=false;try{done=document.execCommand('copy')}catch(error){}area.remove();return done}
document.addEventListener('click',function(event){var button=event.target.closest('button[data-copy]');
if(!button)return;var text=document.getElementById(button.dataset.copy).textContent;
function fallback(){say(button,oldCopy(text)?'Copied':'Select and copy')}
if(navigator.clipboard&&window.isSecureContext){navigator.clipboard.writeText(text).then(
function(){say(button,'Copied')},fallback)}else{fallback()}});
window.addEventListener('beforeprint',function(){document.querySelectorAll('details').forEach(
function(item){item.open=true})});
"""


def page(*, title: str, body: str, is_simulated: bool) -> str:
    """A whole document. Its security policy lets the browser load nothing and run only our script."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>"
        f'<body class="{"sim" if is_simulated else "measured"}">{body}'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def section(name: str, title: str, lead: str, *parts: str) -> Html:
    """A headed section with one sentence on how to read it."""
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return Html(f'<section id="{name}"><h2>{escape(title)}</h2>{intro}{"".join(parts)}</section>')


def details(summary: str, *parts: str, is_open: bool = False) -> Html:
    """A part that opens on demand; printing opens all."""
    state = " open" if is_open else ""
    return Html(f"<details{state}><summary>{escape(summary)}</summary>{''.join(parts)}</details>")


def copyable(name: str, title: str, text: str) -> Html:
    """Text to paste, with a button that copies it."""
    return Html(
        f'<div class="cmd"><div class="bar-top"><span>{escape(title)}</span>'
        f'<button type="button" data-copy="{name}">Copy</button></div>'
        f'<pre id="{name}">{escape(text)}</pre></div>'
    )


def bullets(items: list[str], empty: str) -> Html:
    """A list of sentences, or the sentence that says that there is none."""
    if not items:
        return Html(f'<p class="empty">{escape(empty)}</p>')
    return Html(f'<ul class="list">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>')
