"""All pages and charts: of runs, searches, chains, comparisons, plans, prepared data and measured exports.

A page is a template that extends page.html.j2, which `page.render` fills. `charts` turns numbers into coordinates, and
charts.html.j2 draws them.
"""
