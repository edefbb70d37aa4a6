"""Estimators: which baseline makes the gradient less noisy, and what the proxy costs."""

import comparing
import proxy
import streamlit as st
from address import segments
from widgets import one_run, page

PARTS = {"comparison": "Comparison", "proxy": "Proxy"}

with page("Estimators", "Which baseline makes the gradient less noisy, and what does the proxy cost?"):
    run = one_run()
    part = segments(st, "Part", "part", PARTS, label_visibility="collapsed")
    (proxy.proxy if part == "proxy" else comparing.comparison)(run)
