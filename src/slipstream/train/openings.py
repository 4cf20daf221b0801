"""How the conversations that a head learns from begin.

The model writes the text; an opening only says of what kind. A third of the conversations begin
with an open user's turn and nothing else, the rest with the beginning of a request from the lists
below, crossed with a subject. A document request puts texts that the model wrote earlier before it
again, with something to do about them: replies that copy from a long prompt are a kind of their
own.

All of it is written for this purpose; nothing is taken from a test set.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful programmer. Answer with code and a short explanation.",
    "You are a patient teacher of mathematics.",
    "You rewrite what the user gives you. Keep its meaning.",
    "Summarize the user's text in at most three sentences.",
    "You extract facts from a text and list them.",
    "You are a translator.",
    "Answer in one short sentence.",
)

SUBJECTS = (
    "the water cycle", "a railway station", "the Roman Empire", "a small bakery", "electric cars",
    "the human heart", "a lost dog", "a lost mine", "a chess tournament", "a revolution",
    "a mountain village", "machine learning", "a school trip", "the stock market", "honey bees",
    "a football match", "the moon", "a new phone", "jazz music", "coral reefs", "a job interview",
    "Ancient Egypt", "a wedding", "solar panels", "a library", "vaccines", "a storm at sea",
    "the printing press", "a garden in spring", "black holes", "a court case", "coffee",
    "the city of Berlin", "an old bridge", "healthy food", "a bank account", "whales", "a museum",
    "the Olympic Games", "a robot", "inflation", "a forest fire", "Shakespeare", "a bicycle",
    "the internet", "a hospital", "dinosaurs", "a film director", "the Amazon river", "gravity",
    "a birthday party", "climate change", "a police report", "the Second World War", "a farm",
    "cell biology", "a space mission", "an election", "a restaurant", "the history of Japan",
    "a king and his daughter", "sleep", "a software company", "earthquakes", "a painter", "trade",
)  # fmt: skip

# {} is a subject. Each ends inside the request, so that the model finishes it.
REQUESTS = (
    # questions
    "What is", "What are", "Who was", "Who is the", "When did", "When was the", "Where is",
    "Where was the", "Which country", "How many", "How does", "How do I", "Why is", "Why did",
    "What does", "Can you explain", "Explain {}", "What should I know about {}?", "Is it true that",
    "Who invented", "Who wrote", "Who plays", "How long does it take to", "What is the name of the",
    "What is the difference between", "Tell me about {}", "Give me three facts about {}",
    # code
    "Write a Python function that", "Write a program in C that", "Write a Java class that",
    "Write a JavaScript function to", "Implement an algorithm that", "Write an SQL query that",
    "Write a C++ function that", "Here is my Python code:\n\ndef", "Create an HTML page that",
    "Write a Python script that reads", "Fix the error in this code:\n\n", "Write a Rust function",
    "Write a function to compute", "How do I sort", "Write a bash script that", "Write a recursive",
    "Write a Python class for {}", "Write unit tests for", "Given a list of integers, write",
    # numbers
    "A train leaves", "Tom has", "Maria buys", "If a shop sells", "A farmer has", "Solve for x:",
    "Calculate", "What is the sum of", "A rectangle has", "There are", "Find the value of",
    "Sarah is twice as old as", "A class of", "John earns", "How much money", "In a box there are",
    "A baker makes", "The price of a", "Lena reads", "Every day, Ben", "Find the area of",
    "What is the probability that", "Solve the equation", "A car drives", "At a school,",
    # writing
    "Write a short story about {}", "Write an email to", "Write a poem about {}", "Write a letter",
    "Compose an article about {}", "Write a blog post on {}", "Describe {}", "Draft a speech about",
    "Write a dialogue between", "Write an essay on {}", "Write a product description for",
    "Write a report about {}", "Write the first paragraph of a novel about {}", "Write a review of",
    "Give me tips for", "Make a list of", "Plan a", "Suggest", "Write a news article about {}",
    # roles, reasoning, opinions
    "Imagine you are", "Pretend to be", "Act as", "You are a pirate who", "If you were {}",
    "All cats are animals.", "Which of these is", "Suppose that", "You see", "Think step by step.",
    "What would happen if", "Do you think that", "Compare", "What are the causes of",
    "How did {} change", "What role did", "Discuss the influence of", "Explain the theory of",
    # working on a text
    "Translate this sentence into English:\n\n", "Translate from German into English: Der",
    "Translate from German into English: Die", "Translate into English:\n\nIch",
    "How do you say this in English: Das", "German: In\nEnglish:", "Put into English: Es",
    "Translate into French:\n\n", "Translate into German:\n\n", "Translate to English: La",
    "Summarize the following article:\n\n", "Summarize this text in one sentence:\n\n",
    "Give the main points of the text below.\n\n", "Shorten this:\n\n", "Text:\n\n",
    "Rewrite this paragraph more formally:\n\n", "Correct the grammar:\n\n", "Rewrite:\n\n",
    "Extract all names from this text:\n\n", "List the dates that are mentioned:\n\n",
    "Sort these words into groups:", "Return the following as JSON:\n\n", "Classify:\n1.",
    "Read the text and answer the question.\n\n", "Here is an article about {}:\n\n",
    "Evaluate the following reviews from 1 to 5:\n\n", "From this passage, name", "Article:\n\n",
)  # fmt: skip

# What is asked of a text that the model wrote earlier; {} is the text, [] a word out of it.
TASKS = (
    "Summarize the following text:\n\n{}", "{}\n\nSummarize the text above.",
    "Write a summary of this article.\n\n{}", "{}\n\nIn short:", "Give me the gist of this: {}",
    "{}\n\nWhat are the main points?", "Shorten this text to two sentences:\n\n{}",
    "News report: {}\n\nWrite the highlights.", "Summary of this story, please: {}",
    "{}\n\nWhat does the text say about []?", "{}\n\nWho or what is []?", "{}\n\nWhat is []?",
    "Read this and answer: what is said about []?\n\n{}", "{}\nWhere is [] mentioned, and why?",
    "Context:\n{}\n\nQuestion: what do we learn about []?", "{}\n\nWhen did this happen?",
    "Use only this text to tell me about []:\n\n{}", "{}\nWho is this about?",
    "{}\nName one thing that [] has to do with.", "{}\nWhat is the title of this?",
    "Rewrite this text in a friendlier tone:\n\n{}", "Correct any mistakes:\n\n{}",
    "Extract the key facts from this text as a list:\n\n{}", "Turn this into a list:\n\n{}",
    "List all names and places in this text:\n\n{}", "Repeat this text word for word:\n\n{}",
    "Translate this into French:\n\n{}", "Translate this into German: {}",
    "Translate this into English: {}", "Put this text into English:\n\n{}",
    "Is the tone of this text positive or negative? Explain.\n\n{}",
    "Continue this text:\n\n{}", "Explain this to a child:\n\n{}", "Check this code:\n\n{}",
)  # fmt: skip


_LOWER_CASE = 0.2  # share of requests typed without capitals


def request(chance: random.Random) -> tuple[str, str]:
    """Draw (beginning of a user's turn, system message); either may be empty."""
    system = chance.choice(SYSTEMS) if chance.random() < 0.15 else ""
    if chance.random() < 0.3:
        return "", system
    opening = chance.choice(REQUESTS).replace("{}", chance.choice(SUBJECTS))
    if chance.random() < _LOWER_CASE:
        opening = opening.lower()
    return opening, system


def document_request(chance: random.Random, texts: Sequence[str]) -> str:
    """Draw a user's whole turn about texts, read as one.

    Args:
        texts: at least one, none of them blank.
    """
    text = "\n".join(texts)
    names = [word.strip(".,:;!?\"'()*#`") for word in text.split() if word[:1].isupper()]
    names = [word for word in names if len(word) > 3] or text.split()[:1]
    task = chance.choice(TASKS).replace("[]", chance.choice(names))
    before, _, after = task.partition("{}")
    return before + text + after


def excerpt(chance: random.Random, text: str) -> str:
    """Draw what a reply copies of a text: its beginning, a sentence or two, or all of it."""
    sentences = re.split(r"(?<=[.!?:\n])\s+", text)
    kind = chance.random()
    if kind < 0.2:
        return text
    count = chance.randint(1, 3)
    first = 0 if kind < 0.5 else chance.randrange(len(sentences))
    return " ".join(sentences[first : first + count])
