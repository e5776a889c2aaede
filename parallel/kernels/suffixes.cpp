// A suffix automaton over tokens that grows by one token at a time, counts occurrences, and takes the latest tokens back.
// `suffixes.py` calls it; what it computes is said, and computed once more, in
// `actors/drafters/lookup/suffix_automaton.py`, step by step in the same order.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <utility>
#include <vector>

namespace {

constexpr int32_t NONE = -1;
constexpr int COUNTED = 32;  // suffixes that a token counts, at most

struct Follower {
    int32_t token, state;
};

// Followers of a state by their tokens: a hash table with linear probing, at most three quarters full.
class Followers {
  public:
    int32_t find(int32_t token) const { return cells_[place(token)].state; }

    void put(int32_t token, int32_t state) {
        size_t at = place(token);
        if (cells_[at].token == NONE && 4 * ++size_ > 3 * cells_.size()) {
            std::vector<Follower> before(2 * cells_.size(), {NONE, NONE});
            before.swap(cells_);
            for (const Follower &follower : before)
                if (follower.token != NONE) cells_[place(follower.token)] = follower;
            at = place(token);
        }
        cells_[at] = {token, state};
    }

    void erase(int32_t token) {
        size_t hole = place(token);
        if (cells_[hole].token == NONE) return;
        for (size_t at = wrapped(hole + 1); cells_[at].token != NONE; at = wrapped(at + 1)) {
            // What lies further from its first place than from the hole is found no more unless it moves there.
            if (wrapped(at - first_place(cells_[at].token)) < wrapped(at - hole)) continue;
            cells_[hole] = cells_[at];
            hole = at;
        }
        cells_[hole] = {NONE, NONE};
        size_--;
    }

    void list(std::vector<Follower> &found) const {
        for (const Follower &follower : cells_)
            if (follower.token != NONE) found.push_back(follower);
    }

    size_t num_bytes() const { return sizeof(*this) + cells_.capacity() * sizeof(Follower); }

  private:
    size_t wrapped(size_t at) const { return at & (cells_.size() - 1); }
    size_t first_place(int32_t token) const { return wrapped((static_cast<uint32_t>(token) * 0x9e3779b1u) >> 8); }
    size_t place(int32_t token) const {
        size_t at = first_place(token);
        while (cells_[at].token != token && cells_[at].token != NONE) at = wrapped(at + 1);
        return at;
    }

    std::vector<Follower> cells_ = std::vector<Follower>(4, {NONE, NONE});
    size_t size_ = 0;
};

struct State {
    int32_t link;         // longest suffix that ends at more places
    int32_t length;       // of the longest string of the state
    int32_t count;        // how often its strings occurred
    int32_t token, next;  // the follower seen most often, the latest of equals, and the state after it
    int32_t others;       // place of its further followers; none: NONE
};

// A changed cell of a state, or, without a field, the follower of a token, and its value before; NONE: there was none.
struct Change {
    int32_t State::*field;
    int32_t state, token, before;
};

// What one token changed, to undo it.
struct TokenChanges {
    int32_t last;
    size_t num_states, num_others;
    std::vector<Change> changes;
};

struct Shared {
    double share;
    int32_t token, state;
};

// A follower that may be drafted next: the likeliest first, of equals that which was found first.
struct Offered {
    double chance;
    int64_t age, parent;
    int32_t token, state;
    bool operator<(const Offered &other) const {
        return chance < other.chance || (chance == other.chance && age > other.age);
    }
};

class Automaton {
  public:
    explicit Automaton(int64_t num_revocable) : num_revocable_(static_cast<size_t>(num_revocable)) {
        states_.push_back({NONE, 0, 0, NONE, NONE, NONE});
    }

    int64_t num_tokens() const { return num_tokens_; }
    int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
    int32_t length(int32_t state) const { return states_[state].length; }
    int32_t match() const { return std::max(states_[last_].link, 0); }

    int64_t num_bytes() const {
        size_t size = sizeof(*this) + states_.capacity() * sizeof(State);
        size += (others_.capacity() - others_.size()) * sizeof(Followers);
        for (const Followers &others : others_) size += others.num_bytes();
        for (const TokenChanges &token : revocable_) size += sizeof(token) + token.changes.capacity() * sizeof(Change);
        return static_cast<int64_t>(size);
    }

    void begin_text() { last_ = 0; }

    void extend(int32_t token) {
        const int32_t before = last_;
        std::vector<Change> *changes = nullptr;
        if (num_revocable_ != 0) {
            TokenChanges oldest = {};
            if (revocable_.size() == num_revocable_) {  // its memory is used again
                oldest = std::move(revocable_.front());
                oldest.changes.clear();
                revocable_.pop_front();
            }
            oldest.last = before, oldest.num_states = states_.size(), oldest.num_others = others_.size();
            revocable_.push_back(std::move(oldest));
            changes = &revocable_.back().changes;
        }
        changes_ = changes;
        last_ = grow(before, token);
        num_tokens_++;
        count_suffixes(before, token);
    }

    void take_back(int64_t num_tokens) {
        if (num_tokens > static_cast<int64_t>(revocable_.size())) return;
        for (int64_t i = 0; i < num_tokens; i++) {
            const TokenChanges &token = revocable_.back();
            for (auto change = token.changes.rbegin(); change != token.changes.rend(); ++change) {
                State &state = states_[change->state];
                if (change->field)
                    state.*change->field = change->before;
                else if (change->before == NONE)
                    others_[state.others].erase(change->token);
                else
                    others_[state.others].put(change->token, change->before);
            }
            states_.erase(states_.begin() + static_cast<ptrdiff_t>(token.num_states), states_.end());
            others_.erase(others_.begin() + static_cast<ptrdiff_t>(token.num_others), others_.end());
            last_ = token.last;
            num_tokens_--;
            revocable_.pop_back();
        }
    }

    void read(int64_t &state, int64_t &matched, int32_t token) const {
        int32_t at = static_cast<int32_t>(state), follower;
        while ((follower = follow(at, token)) == NONE) {
            at = states_[at].link;
            if (at == NONE) {
                state = matched = 0;
                return;
            }
            matched = states_[at].length;
        }
        state = follower, matched++;
    }

    // Up to `width`, the likeliest first.
    void followers(int64_t state, int64_t width, std::vector<Shared> &found) {
        found.clear();
        while (states_[state].token == NONE) {
            state = states_[state].link;
            if (state <= 0) return;
        }
        const State &from = states_[state];
        // The current suffix was also counted at the end of the text, where nothing follows yet.
        const int64_t follows = from.count - (state == states_[last_].link);
        const double total = static_cast<double>(follows == 0 ? 1 : follows);
        const auto add = [&](int32_t token, int32_t after) {
            found.push_back({std::min(1.0, static_cast<double>(states_[after].count) / total), token, after});
        };
        add(from.token, from.next);
        if (width == 1 || from.others == NONE) return;
        ranked_.clear();
        others_[from.others].list(ranked_);
        const auto last = ranked_.begin() + std::min<ptrdiff_t>(width - 1, static_cast<ptrdiff_t>(ranked_.size()));
        std::partial_sort(ranked_.begin(), last, ranked_.end(), [&](const Follower &one, const Follower &other) {
            const int32_t count = states_[one.state].count, others = states_[other.state].count;
            return count > others || (count == others && one.state > other.state);
        });
        for (auto other = ranked_.begin(); other != last; ++other) add(other->token, other->state);
    }

    // The likeliest tokens after a state and the places of their parents, 0 for the state itself; returns their number.
    int64_t likeliest(int64_t state, int64_t length, int64_t width, double least, int32_t *tokens, int32_t *parents,
                      double &score) {
        std::priority_queue<Offered> offered;
        double chance = 1.0;
        int64_t age = 0, node = 0;
        score = 0.0;
        while (node < length) {
            followers(state, width, shared_);
            for (const Shared &follower : shared_)
                if (chance * follower.share >= least)
                    offered.push({chance * follower.share, age++, node, follower.token, follower.state});
            if (offered.empty()) break;
            const Offered best = offered.top();
            offered.pop();
            tokens[node] = best.token, parents[node] = static_cast<int32_t>(best.parent);
            node++;
            chance = best.chance, state = best.state;
            score += chance;
        }
        return node;
    }

  private:
    int32_t follow(int32_t state, int32_t token) const {
        const State &from = states_[state];
        if (from.token == token) return from.next;
        return from.others == NONE ? NONE : others_[from.others].find(token);
    }

    int32_t add_state(int32_t length, int32_t link) {
        states_.push_back({link, length, 0, NONE, NONE, NONE});
        return static_cast<int32_t>(states_.size()) - 1;
    }

    void set(int32_t State::*field, int32_t state, int32_t value) {
        if (changes_) changes_->push_back({field, state, NONE, states_[state].*field});
        states_[state].*field = value;
    }

    // `before`: its value before, NONE if there was none.
    void set_follower(int32_t state, int32_t token, int32_t value, int32_t before) {
        if (changes_) changes_->push_back({nullptr, state, token, before});
        others_[states_[state].others].put(token, value);
    }

    // The state of the text followed by `token`.
    int32_t grow(int32_t last, int32_t token) {
        int32_t after = follow(last, token);
        if (after != NONE) return exact(last, token, after);  // an earlier text began in the same way
        const int32_t state = add_state(states_[last].length + 1, 0);
        int32_t suffix = last;
        for (; suffix != NONE && (after = follow(suffix, token)) == NONE; suffix = states_[suffix].link) {
            if (states_[suffix].token == NONE) {
                set(&State::token, suffix, token);
                set(&State::next, suffix, state);
                continue;
            }
            if (states_[suffix].others == NONE) {
                set(&State::others, suffix, static_cast<int32_t>(others_.size()));
                others_.emplace_back();
            }
            set_follower(suffix, token, state, NONE);
        }
        const int32_t link = suffix == NONE ? 0 : exact(suffix, token, after);
        states_[state].link = link;
        return state;
    }

    // The state whose longest string is that of `suffix` and `token`: `after` itself, or a clone split off from it.
    int32_t exact(int32_t suffix, int32_t token, int32_t after) {
        const int32_t length = states_[suffix].length + 1;
        if (states_[after].length == length) return after;
        const int32_t clone = add_state(length, states_[after].link);
        const State from = states_[after];
        State &to = states_[clone];
        to.count = from.count, to.token = from.token, to.next = from.next;
        if (from.others != NONE) {
            to.others = static_cast<int32_t>(others_.size());
            others_.push_back(Followers(others_[from.others]));
        }
        set(&State::link, after, clone);
        for (; suffix != NONE && follow(suffix, token) == after; suffix = states_[suffix].link) {
            if (states_[suffix].token == token)
                set(&State::next, suffix, clone);
            else
                set_follower(suffix, token, clone, after);
        }
        return clone;
    }

    // Counts every suffix of the text once more, and `token` as a follower of the suffix before it.
    void count_suffixes(int32_t suffix, int32_t token) {
        int32_t counted = NONE;
        for (int i = 0; i < COUNTED && suffix != NONE; i++) {
            const int32_t after = follow(suffix, token);
            if (after != counted) set(&State::count, after, states_[after].count + 1);
            counted = after;
            const State from = states_[suffix];
            if (from.token != token && states_[after].count >= states_[from.next].count) {
                if (changes_) changes_->push_back({nullptr, suffix, token, after});
                others_[from.others].erase(token);
                set_follower(suffix, from.token, from.next, NONE);
                set(&State::token, suffix, token);
                set(&State::next, suffix, after);
            }
            suffix = from.link;
        }
    }

    std::vector<State> states_;
    std::vector<Followers> others_;  // in the order in which states got them, so that the latest go first
    std::deque<TokenChanges> revocable_;
    std::vector<Change> *changes_ = nullptr;  // of the token being entered, if it can be taken back
    std::vector<Follower> ranked_;
    std::vector<Shared> shared_;
    size_t num_revocable_;
    int64_t num_tokens_ = 0;
    int32_t last_ = 0;
};

// The record of `suffixes.py`, field by field.
struct Record {
    Automaton *automaton;
    int64_t num_tokens, num_states, match, match_len;  // after the latest change
    int64_t state, matched, found;                     // results of the latest call
    double score;
};

void note_change(Record *record) {
    const Automaton &automaton = *record->automaton;
    record->num_tokens = automaton.num_tokens();
    record->num_states = automaton.num_states();
    record->match = automaton.match();
    record->match_len = automaton.length(automaton.match());
}

}  // namespace

extern "C" {

void suffixes_open(Record *record, int64_t num_revocable) {
    record->automaton = new Automaton(num_revocable);
    note_change(record);
}

void suffixes_close(Automaton *automaton) { delete automaton; }

// tokens [count], at the end of the latest text, or as a text of their own
void suffixes_extend(Record *record, const int32_t *tokens, int64_t count, bool is_text) {
    if (is_text) record->automaton->begin_text();
    for (int64_t i = 0; i < count; i++) record->automaton->extend(tokens[i]);
    if (is_text) record->automaton->begin_text();
    note_change(record);
}

void suffixes_take_back(Record *record, int64_t num_tokens) {
    record->automaton->take_back(num_tokens);
    note_change(record);
}

// From `state` and `matched` of the record to those after tokens [count].
void suffixes_read(Record *record, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) record->automaton->read(record->state, record->matched, tokens[i]);
}

// Up to `width` followers of a state: shares, tokens and states [width]
void suffixes_followers(Record *record, int64_t state, int64_t width, double *shares, int32_t *tokens, int32_t *states) {
    std::vector<Shared> found;
    record->automaton->followers(state, width, found);
    record->found = static_cast<int64_t>(found.size());
    for (const Shared &follower : found) *shares++ = follower.share, *tokens++ = follower.token, *states++ = follower.state;
}

// tokens, parents [length]
void suffixes_likeliest(Record *record, int64_t state, int64_t length, int64_t width, double least, int32_t *tokens,
                        int32_t *parents) {
    record->found = record->automaton->likeliest(state, length, width, least, tokens, parents, record->score);
}

void suffixes_num_bytes(Record *record) { record->found = record->automaton->num_bytes(); }
}
