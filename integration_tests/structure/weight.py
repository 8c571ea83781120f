"""Prints the packages' sizes: lines and files, by package and by folder.

Run by ``nox -s lint -- --sizes``. Without ``--sizes`` it refuses packages that are too
large (``structure.limits``).
"""

import argparse
from collections import Counter

from structure.limits import ROOT, lines_of, module_imports, settings, sources


def main() -> None:
    """Prints what was weighed."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    budgets, lines = settings(ROOT)["towers"]["budgets"], lines_of(ROOT)
    single_use = 0
    print("| package | lines | budget | files | in one folder |\n|---|---|---|---|---|")
    for package, count in lines.items():
        folders = Counter(file.parent for file in sources(ROOT, package))
        print(
            f"| {package} | {count:,} | {budgets[package]:,} | {folders.total()} "
            f"| {max(folders.values())} |"
        )
        imports = module_imports(ROOT, package)
        importers = Counter(name for imported in imports.values() for name in imported)
        single_use += sum(importers[name] == 1 for name in imports)
    total = f"{sum(lines.values()):,} | {sum(budgets.values()):,}"
    print(f"| all | {total} | {len(sources(ROOT))} | |")
    print(f"\nModules with one importer: {single_use}")


if __name__ == "__main__":
    main()
