"""Requests for code, whole ones: what is asked in which language and in whose words.

Code is where drafts pay most, and a small model left to itself rarely asks for it. Parts are drawn
apart from each other, so that few requests come twice. Written for this purpose; nothing is taken
from a test set.
"""

from __future__ import annotations

import random

LANGUAGES = (
    "Python", "Python", "Python", "Python", "Python", "C++", "C++", "Java", "Java", "JavaScript",
    "JavaScript", "C", "C", "Go", "Rust", "TypeScript", "C#", "Ruby", "PHP", "Kotlin", "Swift",
)  # fmt: skip

# What comes after "a function to" or "that ... can".
TASKS = (
    "reverse a string", "check whether a word is a palindrome", "find the largest number in a list",
    "compute the factorial of n", "count the vowels in a sentence", "sort a list with quicksort",
    "sort an array of integers with merge sort", "find the second smallest element of an array",
    "remove duplicates from a list", "merge two dictionaries", "search a sorted array by bisection",
    "compute the greatest common divisor of two numbers", "test if a number is prime",
    "list all primes below n", "convert Celsius to Fahrenheit", "count words in a text file",
    "read a CSV file and print the average of each column", "rotate a matrix by 90 degrees",
    "multiply two matrices", "transpose a matrix", "flatten a nested list", "parse a date",
    "check that brackets are balanced", "evaluate an arithmetic expression",
    "reverse a linked list",
    "detect a cycle in a linked list", "insert a node into a binary search tree",
    "print a tree level by level", "compute the depth of a tree",
    "find the shortest path in a graph",
    "traverse a graph depth first", "traverse a graph breadth first", "sum the digits of a number",
    "convert a decimal number to binary", "convert Roman numerals to integers",
    "generate all permutations of a string", "generate all subsets of a set",
    "count how often each character occurs", "find anagrams in a list of words",
    "shuffle a deck of cards", "roll two dice a thousand times and count the results",
    "guess a number between 1 and 100", "play tic-tac-toe on the command line",
    "draw a triangle of stars", "print a multiplication table", "validate an email address",
    "check if a year is a leap year", "encrypt a text with a Caesar cipher", "hash a password",
    "download a web page", "call a REST API and print the JSON", "connect to a database",
    "insert a row into a SQLite table", "keep a to-do list in a file", "manage a bank account",
    "compute compound interest", "find the maximum sum of a contiguous subarray",
    "find two numbers in an array that add up to a target", "solve the knapsack problem",
    "solve the n queens problem", "climb n stairs in steps of one or two", "compute n choose k",
    "find the longest increasing subsequence", "compute the edit distance of two words",
    "implement a stack", "implement a queue with two stacks", "implement a hash map",
    "implement a priority queue", "implement an LRU cache", "implement a trie",
    "split a string at commas", "capitalize every word", "find all numbers in a text with a regex",
    "measure how long a function takes", "retry a request three times", "log messages to a file",
    "sum the even numbers of a list", "find the mode of a list", "compute mean and median",
    "normalize a vector", "fit a straight line to points", "train a linear regression model",
    "cluster points with k-means", "plot a sine wave", "resize an image", "count files in a folder",
    "rename all files in a directory", "copy a file", "zip a folder", "sort words by their length",
    "swap two variables", "find missing numbers in a sequence", "check if two strings are equal",
    "move all zeros to the end of an array", "find the intersection point of two lines",
    "compute the area of a circle", "compute powers by repeated squaring",
    "run a simple web server",
    "handle a form in a web page", "show a list of items on a page", "toggle a button's color",
)  # fmt: skip

ASKS = (
    "Write a {l} function to {t}.", "Write a {l} program to {t}.", "Write {l} code to {t}.",
    "Implement a function in {l} to {t}.", "How do I {t} in {l}?", "How can I {t} using {l}?",
    "Can you write a {l} script to {t}?", "Show me how to {t} in {l}.", "I need {l} code to {t}.",
    "Please implement an algorithm in {l} to {t}", "Give me an example of how to {t} in {l}.",
    "write a {l} function to {t}", "Create a {l} class to {t}.", "{l}: {t}",
    "Implement a program to {t}.",
    "Develop a {l} program to {t}.", "Design an algorithm to {t} and implement it in {l}.",
    "Write a function to {t}.", "Write a program to {t}.", "Write a recursive {l} function to {t}.",
    "What is the most efficient way to {t} in {l}?", "Write code to {t}",
)  # fmt: skip

WISHES = (
    "", "", "", "", "", " Explain your code.", " Add comments.", " Include an example.",
    " Use no libraries.", " Make it run in linear time.", " Handle errors.", " Use recursion.",
    " Use constant extra space.", " Include unit tests.", " Keep it short.", " Use a loop.",
    " What is its time complexity?", " The input is given by the user.", " Return the result.",
    " Assume that the input is valid.", " Give me only the code.", " Use type hints.",
)  # fmt: skip

# Written before by the model, or by anyone: {c} is a piece of code.
ABOUT_CODE = (
    "Explain what this code does:\n\n```\n{c}\n```", "Find the bug in this code:\n\n```\n{c}\n```",
    "{c}\n\nWhat does this print?", "Rewrite this code in {l}:\n\n```\n{c}\n```",
    "Here is my code. How can I make it faster?\n\n```\n{c}\n```",
    "Add comments to this code:\n{c}",
    "Here is a function. Can you find an error in it?\n\n```\n{c}\n```", "Refactor this:\n\n{c}",
    "Write unit tests for the following code:\n\n```\n{c}\n```", "Complete this code:\n\n```\n{c}",
)  # fmt: skip


def code_request(chance: random.Random) -> str:
    """Draw a whole request for code."""
    ask = chance.choice(ASKS).replace("{l}", chance.choice(LANGUAGES))
    return ask.replace("{t}", chance.choice(TASKS)) + chance.choice(WISHES)


def about_code(chance: random.Random, code: str) -> str:
    """Draw a whole request about a piece of code."""
    ask = chance.choice(ABOUT_CODE).replace("{l}", chance.choice(LANGUAGES))
    return ask.replace("{c}", code)
