"""A schedule as one HTML file: tensors, collectives, memory, operations and the timeline of a step.

Python gathers the data (`page_data`), JavaScript draws them (`page.js`). The page needs no network and no library.
"""
