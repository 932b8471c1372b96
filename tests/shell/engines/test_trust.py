import ssl

import pytest

from epp.configuration.compatibility import DcgmDataSource, MetricsDataSource, MetricsScheme
from epp.configuration.config import ConfigError
from epp.shell.engines.trust import client_context, trust_of


def test_by_http_and_with_whoever_answers_nothing_is_needed():
    """The default."""
    assert trust_of(MetricsDataSource()) is None
    assert trust_of(MetricsDataSource(insecure_skip_verify=False)) is None
    assert trust_of(MetricsDataSource(scheme=MetricsScheme.HTTPS)) is None
    assert trust_of(DcgmDataSource(scheme=MetricsScheme.HTTPS)) is None


def test_a_source_that_verifies_does():
    """By the system's authorities, where no file is given."""
    for kind in (MetricsDataSource, DcgmDataSource):
        context = trust_of(kind(scheme=MetricsScheme.HTTPS, insecure_skip_verify=False))
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname


def test_whoever_answers_is_trusted_only_if_it_is_told():
    """Both of what makes it."""
    context = client_context("files", insecure_skip_verify=True)
    assert context.verify_mode is ssl.CERT_NONE
    assert not context.check_hostname


@pytest.mark.parametrize("name", ["ca_cert_path", "client_cert_path"])
def test_files_that_are_none_are_said_in_a_sentence(tmp_path, name):
    """Missing, or no certificates."""
    broken = tmp_path / "broken.pem"
    broken.write_text("none")
    for path in (str(broken), str(tmp_path / "missing.pem")):
        with pytest.raises(ConfigError, match="files cannot be used: "):
            client_context("files", **{name: path})
