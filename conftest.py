"""Plugins for our own tests: pytester runs pytest on small projects, some with a stand-in
engine whose bodies say what memory they use."""

import os

pytest_plugins = ["pytester", "tests.project"]

# These tests read what pytest prints on a terminal; on a build server pytest and we print more.
for _name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(_name, None)
