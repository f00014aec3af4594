"""Frames of pandas, estimators of scikit-learn.

Each row is a notebook that shows and leaves the same with its header and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Program, assert_same, each_of, row, together

pytestmark = pytest.mark.usefixtures("oracle")

ROWS = [
    row(
        "object column",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": pd.Series(["x", "y"], dtype=object), "n": [1, 2]})
        """,
        cell="""
            df.loc[0, "a"] = "z"
            df["b"] = df["n"] * 2
        """,
        check="df",
    ),
    row(
        "index of several levels",
        setup="""
            import numpy as np, pandas as pd
            idx = pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["p", "q"])
            df = pd.DataFrame({"u": np.arange(4)}, index=idx)
            level = idx.levels[0]
        """,
        cell="""
            df["v"] = df["u"] * 2
            n = df.shape
        """,
        check="df.index is idx, idx.levels[0] is level, df",
    ),
    row(
        "a column of pandas",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]})
            s = df["a"]
            k = df["b"]
        """,
        cell="""
            s.iloc[0] = 50
            df.loc[1, "b"] = 9
        """,
        check="df, s, k",
    ),
    row(
        "a column that stays behind",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": [1, 2, 3]})
            s = df["a"]
        """,
        cell="""
            df.loc[0, "a"] = 9
            new = df["a"]
            v = df[["a"]]
        """,
        check="""
            s.iloc[2] = 7
            df, s, new, v
        """,
    ),
    row(
        "a column taken in the cell",
        setup="import pandas as pd",
        cell="""
            df = pd.DataFrame({"a": [1, 2, 3]})
            s = df["a"]
            w = df.copy(deep=False)
        """,
        check='s.__setitem__(0, 5), w.__setitem__("b", 1), df, s, w',
    ),
    row(
        "a frame changed in place",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": [3, 1, 2]}, index=list("xyz"))
            k = df
            col = df["a"]
            arr = df.to_numpy()
        """,
        cell="""
            df.sort_values("a", inplace=True)
            df.drop("x", inplace=True)
            df.columns = ["A"]
            df["B"] = pd.array([1, None], dtype="Int64")
        """,
        check="k is df, df, col, arr",
    ),
    row(
        "table with columns of two kinds",
        setup="""
            import pandas as pd
            a = pd.DataFrame([[1, 2], [3, 4]])
        """,
        cell="""
            a["p"] = 1
            b = pd.DataFrame({0: [1], "a": [2]})
        """,
        check="a, b",
    ),
    row(
        "indexes made of a frame's columns",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": [1, 2, 3], "b": list("xyz")})
            key = pd.Index(df["a"])
        """,
        cell="""
            idx = pd.Index(df["a"])
            by = df.set_index("b")
            cat = pd.Categorical([1, 2], categories=df["a"])
        """,
        check="""
            df.loc[0, "b"] = "w"
            df.loc[0, "a"] = 9
            df, list(key), list(idx), by, cat
        """,
    ),
    row(
        "groups of a frame",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "x"], "c": [0.1, 0.2, 0.3]})
        """,
        cell='g = {k: g for k, g in df.groupby("b")}',
        check="g",
    ),
    row(
        "forest",
        setup="""
            from sklearn.ensemble import RandomForestClassifier
            import numpy as np
            X = np.arange(20.0).reshape(10, 2)
            y = np.arange(10) % 2
            rf = RandomForestClassifier(3, random_state=0)
        """,
        cell="rf.fit(X, y)",
        check="rf.predict(X), rf.feature_importances_",
    ),
    row(
        "estimator of the notebook",
        setup="""
            import numpy as np
            from sklearn.base import BaseEstimator, ClassifierMixin

            class Mine(ClassifierMixin, BaseEstimator):
                def __init__(self, a=1):
                    self.a = a

                def fit(self, X, y):
                    self.coef_ = X.mean(0)
                    self.bounds_ = np.unique(y)
                    self.classes_ = np.unique(y)
                    return self

            X = np.arange(8.0).reshape(4, 2)
            y = np.array([0, 1, 0, 1])
            e = Mine()
            k = [e]
        """,
        cell="""
            e.fit(X, y)
            f = Mine(2).fit(X, y)
        """,
        check="e.coef_, f.get_params(), k[0] is e, e.classes_",
    ),
    row(
        "views behind __getstate__",
        setup="""
            import numpy as np
            from sklearn.base import BaseEstimator

            class Clip(BaseEstimator):
                def fit(self, x):
                    self.lo, self.hi = np.percentile(x, [5, 95], axis=0).T
                    self.both = [self.lo]
                    return self

            c = Clip()
        """,
        cell="d = c.fit(np.arange(8.0).reshape(4, 2))",
        check="d is c, c.lo.strides, c.both[0] is c.lo, c.lo.base is c.hi.base",
    ),
]
"""Each shares a notebook with others, whose cells are one: what it binds gets its number."""

ALONE = [
    row(
        "a frame anew in what cannot change",
        setup="""
            import pandas as pd
            df = pd.DataFrame({"a": ["x", "y"], "n": [1, 2]})
            cat = pd.Categorical(df["a"])
            k = (df, (cat,))
        """,
        cell="""
            df["u"] = df["a"].astype("category").cat.codes
            df = df.sort_values(["n", "u"])
            df["r"] = df.groupby("a")["n"].rank()
        """,
        check="df, k[0], k[1][0] is cat",
    )
]
"""Each has a notebook of its own."""


@each_of([*together(ROWS), *ALONE])
def test_the_same_cells_with_and_without_the_header(program: Program, tmp_path: Path) -> None:
    """What they show and leave is the same, and nothing is lost."""
    assert_same(program, tmp_path)
