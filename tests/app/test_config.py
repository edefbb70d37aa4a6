import tomllib
from pathlib import Path

APP = Path(__file__).parents[2] / "app"


def test_dashboard_listens_on_loopback_and_reports_to_nobody():
    config = tomllib.loads((APP / ".streamlit" / "config.toml").read_text())
    assert config["server"]["address"] == "127.0.0.1"
    assert config["browser"]["gatherUsageStats"] is False


def test_no_page_names_an_address_elsewhere():
    sources = [p.read_text() for p in APP.rglob("*") if p.suffix in (".py", ".toml")]
    assert not any("http://" in text or "https://" in text for text in sources)


def test_token_component_never_parses_text_as_markup():
    source = (APP / "token_view.py").read_text()
    assert "innerHTML" not in source
    assert "insertAdjacentHTML" not in source
    assert "textContent" in source


def test_pages_bound_every_cache():
    source = (APP / "data.py").read_text()
    assert source.count("@st.cache_") == source.count("max_entries=")
