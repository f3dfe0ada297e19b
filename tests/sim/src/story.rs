//! The trace of a shrunk world, for people.

use crate::trace::Line;

/// So many routine lines in a row are told one by one.
const FEW: usize = 6;

/// How many lines a story has.
pub(crate) fn length(lines: &[Line]) -> usize {
    told(lines).len()
}

/// A story, line by line.
pub(crate) fn told(lines: &[Line]) -> Vec<String> {
    let mut told = Vec::new();
    let mut rest = lines;
    while let [first, ..] = rest {
        let routine = rest.iter().take_while(|line| line.is_routine).count();
        if routine > FEW {
            let (many, others) = rest.split_at(routine);
            let (begin, left) = many.split_at(FEW / 2);
            let (left, end) = left.split_at(left.len() - FEW / 2);
            told.extend(begin.iter().map(Line::to_string));
            told.push(format!("{:>9}  {:<8}  … {} more such lines", "", "", left.len()));
            told.extend(end.iter().map(Line::to_string));
            rest = others;
        } else {
            told.push(first.to_string());
            rest = &rest[1..];
        }
    }
    told
}
